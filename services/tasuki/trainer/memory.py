"""One trainer rank's memory: parameters, gradients and optimizer state, each in its tag's arena."""

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tasuki.memory.arena import Arena, Keep, NativeAllocator, freeze
from tasuki.memory.device_usage import device_usage, torch_pool
from tasuki.planner.node import MARGIN, Node, Part
from tasuki.planner.plan import TRAINER_TAGS
from tasuki.planner.trainer_bytes import trainer_tags
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.trainer.replicas import mesh_device
from tasuki.trainer.resident_tags import NONE_RESIDENT, RESTORED, TAGS, ExportChoice, Onload, ResidentTags
from tasuki.v1 import memory_pb2
from tasuki.v1.ranks_pb2 import RankPublished
from tasuki.v1.types_pb2 import DeviceUsage, TagUsage
from tasuki.weights.export import ExportMemory, Replaced, WeightExport
from tasuki.wire.errors import OutOfGpuMemory, TasukiError
from tasuki.wire.stages import MemoryTag

# Nothing is offloaded while gradients are pending, so their content need not be kept.
_KEEP = {MemoryTag.WEIGHTS: Keep.CONTENT, MemoryTag.OPTIMIZER: Keep.CONTENT}
# Pinned in one step; between steps the process checks whether it is ending.
_PIN_STEP_BYTES = 256 * 2**20
_PARTS: dict[MemoryTag, Part] = dict(zip(TAGS, TRAINER_TAGS, strict=True))
MAX_TRIES, ENOUGH_BYTES = 3, 10**9
# Of the size of a tensor that a round places elsewhere.
_STEP_BYTES = 10**8
_log = logging.getLogger("tasuki.trainer")


class TorchCache:
    """Blocks of one GPU's torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stuck_bytes = 0
        """Least that is known to stay after all tries: parts of segments in which a tensor lives."""

    def leave(self, num_bytes: int) -> None:
        """Returns blocks if less than that is free on the GPU: a step may cache more than was planned."""
        if (free := torch.cuda.mem_get_info(self._device)[0]) < num_bytes:
            cached = self.return_blocks()
            _log.info("event=cache_returned free_bytes=%d needed_bytes=%d cached_bytes=%d", free, num_bytes, cached)

    def return_blocks(self) -> int:
        """Returns blocks to the driver, in at most MAX_TRIES tries, until less than ENOUGH_BYTES is reserved but unallocated. Returns that.

        A further try first frees tensors in reference cycles, and waits for streams that still use a block. Collecting is slow, so there is
        no such try for what earlier calls could not return either.
        """
        cached = 0
        for number in range(MAX_TRIES):
            if number:
                gc.collect()
                torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            reserved, allocated = torch_pool(self._device.index or 0)
            cached = reserved - allocated
            if cached < max(ENOUGH_BYTES, self._stuck_bytes + _STEP_BYTES):
                self._stuck_bytes = min(self._stuck_bytes, cached)
                return cached
        self._stuck_bytes = cached
        _log.warning("event=cache_kept bytes=%d tries=%d", cached, MAX_TRIES)
        return cached


def round_blocks() -> None:
    """Makes torch allocate blocks of eight sizes between powers of two, so that tensors of another size in every pass reuse them.

    For what is allocated later. By default the unused part grows with the steps (docs/benchmarks.md).
    """
    torch._C._accelerator_setAllocatorSettings("roundup_power2_divisions:8")


class TrainerMemory:
    """Pausable memory of one rank. Tensors keep their addresses for the life of the process."""

    def __init__(
        self,
        mesh: DeviceMesh,
        export: ExportChoice,
        *,
        resident: ResidentTags = NONE_RESIDENT,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        """heartbeat: shows the progress of background work."""
        device = mesh_device(mesh)
        self._mesh, self._device, self._choice, self._resident = mesh, device, export, resident
        self._allocator = NativeAllocator(tags=TAGS, device=str(device), keep=_KEEP)
        if export.of_parameters and export.stays:
            # The same chunks that rollout has mapped.
            self._allocator.arena(MemoryTag.WEIGHTS).set_policy(Keep.CHUNKS)
        self._export: WeightExport | None = None
        self._is_export_there = False
        self._is_merged = False
        """Whether the base may hold merged weights, or parts of them."""
        self._gradients: list[Tensor] = []
        self._onload = Onload(self._allocator)
        self._heartbeat = heartbeat
        self._cache = TorchCache(device)
        self._pinning: threading.Thread | None = None
        self._is_closing = threading.Event()

    def region(self, tag: MemoryTag) -> AbstractContextManager[None]:
        """Allocates tensors created in the block under `tag`."""
        return self._allocator.region(tag)

    def freeze(self, tensors: Iterable[Tensor]) -> None:
        """Declares tensors constant for the life of the process, but for merging: each is copied to the host once, not at every pause."""
        for tensor in tensors:
            if tensor.numel():
                freeze(tensor.data_ptr(), tensor.nbytes)

    def clear_at_resume(self, gradients: list[Tensor]) -> None:
        """Declares tensors of tag GRADIENTS, whose content no pause keeps. They are zeros from now on."""
        with torch.no_grad():
            torch._foreach_zero_(
                gradients
            )  # on a GPU the first call loads its kernel, which the first LOAD_TRAINER would wait for
        self._gradients += gradients

    def pin_in_background(self, node: Node) -> None:
        """Allocates the pinned host memory for OFFLOAD in the background; `pause` waits for it. Does nothing on a CPU."""
        leaving = [tag for tag in _KEEP if tag not in self._resident.tags]
        if self._device.type == "cuda" and leaving:
            sizes = trainer_tags(node)
            arenas = {self._allocator.arena(tag): sizes[_PARTS[tag]] for tag in leaving}
            self._pinning = threading.Thread(target=self._pin, args=(arenas,), name="pinning", daemon=True)
            self._pinning.start()

    def close(self) -> None:
        """Stops background work."""
        self._is_closing.set()
        self._end_pinning()

    def make_adamw_state(self, optimizer: torch.optim.AdamW, *, make: Callable[[Tensor], dict[str, Tensor]]) -> None:
        """Creates the state before the first step. make: a parameter's moments. Step counts, a few bytes, are not part of the tag."""
        steps = {
            parameter: torch.zeros((), device=self._device) for group in optimizer.param_groups for parameter in group["params"]
        }
        with self.region(MemoryTag.OPTIMIZER):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter] = {"step": steps[parameter], **make(parameter)}

    def export(self, make: Callable[[ExportMemory], WeightExport]) -> WeightExport:
        """Creates the export with its memory at the first call, and reallocates the memory after it has left. Collective.

        Adapters may then be merged into a base that is published. Raises OutOfGpuMemory on all ranks if one of them, or its host, has no
        room.
        """
        self._onload.wait([MemoryTag.WEIGHTS])
        if not (self._is_export_there and self._choice.stays):
            error: TasukiError | None = None
            try:
                if self._export is None:
                    self._export = self._made(make)
                self._allocator.resume(self._copies())
            except TasukiError as raised:
                error = raised
            self._raise_if_any(error, self._copies(), of=[MemoryTag.EXPORT])
            self._is_export_there = True
        if self._choice.merges:
            self._save_base()
        assert self._export is not None
        return self._export

    def restore_base(self) -> None:
        """Undoes merging into the base, whose publication ends. Whoever reads weights calls it, or `wait_for_content`."""
        if self._is_merged:
            if self._export is not None:
                self._export.withdraw()
            self._allocator.arena(MemoryTag.WEIGHTS).restore_frozen()
            self._is_merged = False

    def make_room(self) -> None:
        """Returns what torch caches if stages after LOAD_WEIGHTS would lack memory."""
        if self._device.type == "cuda":
            self._cache.leave(self._resident.later_bytes + MARGIN)

    def release_export(self) -> None:
        """Releases the memory of a withdrawn export that does not stay; the next one reallocates it."""
        if self._export is not None and not self._choice.stays and (copies := self._copies()):
            with self._export.released():
                self._allocator.pause(copies)

    def pause(self, request: memory_pb2.PauseRequest) -> memory_pb2.PauseResponse:
        released = self.pause_tags(MemoryTag.all_of(request.tags), makes_room=request.makes_room)
        return memory_pb2.PauseResponse(released_bytes=released)

    def resume(self, request: memory_pb2.ResumeRequest) -> memory_pb2.ResumeResponse:
        return memory_pb2.ResumeResponse(mapped_bytes=self.resume_tags(MemoryTag.all_of(request.tags)))

    def pause_tags(self, tags: Sequence[MemoryTag], *, makes_room: bool = False) -> int:
        """Releases the pages of `tags`; parameters and optimizer state move to host memory. Returns the bytes released.

        makes_room: also releases tags that stay during OFFLOAD. Raises OutOfGpuMemory, with every tag still
        resident, if the host cannot pin the memory for the copies.
        """
        self._end_pinning()
        self._onload.wait()
        copies = self._copies() if MemoryTag.WEIGHTS in tags and not self._choice.stays else []
        tags = [*(tag for tag in tags if makes_room or tag not in self._resident.tags), *copies]
        is_shared = MemoryTag.EXPORT in tags or (MemoryTag.WEIGHTS in tags and not self._choice.stays)
        with self._export.released() if self._export is not None and is_shared else nullcontext():
            released = self._allocator.pause(tags)
        # It returns as it was frozen.
        self._is_merged = self._is_merged and MemoryTag.WEIGHTS not in tags
        if self._device.type == "cuda" and (makes_room or not self._resident.cache):
            self._cache.return_blocks()
        return released

    def resume_tags(self, tags: Sequence[MemoryTag]) -> int:
        """Maps pages for `tags` and restores their content. Returns the bytes mapped.

        Content may still be arriving on return, for which readers `wait_for_content`. Collective.
        Raises OutOfGpuMemory on all ranks, with every tag still paused, if one of them has no room.
        """
        paused = MemoryTag.all_of(usage.tag for usage in self._allocator.usage() if usage.is_paused)
        slept = [tag for tag in paused if tag in tags]
        error: TasukiError | None = None
        mapped = 0
        try:
            if MemoryTag.WEIGHTS in tags:
                self.restore_base()
            mapped = self._take_pages(slept)
        except TasukiError as raised:
            error = raised
        self._raise_if_any(error, slept)
        if MemoryTag.GRADIENTS in slept:
            # Their content was not kept.
            with torch.no_grad():
                torch._foreach_zero_(self._gradients)
        return mapped

    def wait_for_content(self) -> None:
        """Waits until weights and optimizer state have their content."""
        self.restore_base()
        self._onload.wait()

    def usage(self) -> list[TagUsage]:
        staying = {*self._resident.tags, *([MemoryTag.EXPORT] if self._choice.stays else [])}
        usages = self._allocator.usage()
        for usage in usages:
            usage.stays = MemoryTag.of(usage.tag) in staying
        return usages

    def device_usage(self, *, skip_torch_cache: bool = False) -> DeviceUsage:
        return device_usage(str(self._device), self._mesh.get_local_rank(), skip_torch_cache=skip_torch_cache)

    def _pin(self, arenas: Mapping[Arena, int]) -> None:
        """arenas: with the number of bytes that each will need."""
        started, num_steps = time.monotonic(), 0
        try:
            with nullcontext() if self._heartbeat is None else self._heartbeat.transferring(lambda: num_steps):
                for arena, total_bytes in arenas.items():
                    while arena.reserve_host(_PIN_STEP_BYTES, total_bytes=total_bytes) and not self._is_closing.is_set():
                        num_steps += 1
        except TasukiError as error:  # raised again by the pause that needs the memory
            _log.error("event=pinning_failed reason=%s error=%s", error.reason, error.message)
            return
        _log.info(
            "event=pinned bytes=%d seconds=%.1f",
            sum(arena.usage().host_copy_bytes for arena in arenas),
            time.monotonic() - started,
        )

    def _end_pinning(self) -> None:
        pinning, self._pinning = self._pinning, None
        if pinning is not None:
            pinning.join()

    def _save_base(self) -> None:
        """Copies the frozen base to the host, once, and lets it be merged into. Collective. Raises OutOfGpuMemory on all ranks."""
        self._end_pinning()
        error: TasukiError | None = None
        try:
            self.restore_base()
            self._allocator.arena(MemoryTag.WEIGHTS).save_frozen()
        except TasukiError as raised:
            error = raised
        self._raise_if_any(error, [], of=["a host copy of the weights"])
        self._is_merged = True

    def _made(self, make: Callable[[ExportMemory], WeightExport]) -> WeightExport:
        choice = self._choice
        parameters = self._allocator.arena(MemoryTag.WEIGHTS) if choice.of_parameters else None
        memory = ExportMemory(parameters, leaves=not choice.stays, handles=choice.handles)
        export = make(memory)
        if export.copies is not None:
            self._allocator.adopt(MemoryTag.EXPORT, export.copies)
        return export

    def _copies(self) -> list[MemoryTag]:
        return [MemoryTag.EXPORT] if MemoryTag.EXPORT in self._allocator.tags else []

    def _take_pages(self, tags: Sequence[MemoryTag]) -> int:
        others = [tag for tag in tags if tag not in RESTORED]
        before = self._mapped_bytes()
        self._allocator.resume(others)
        try:
            self._onload.begin(tags)
        except TasukiError:
            self._allocator.pause(others)
            raise
        return self._mapped_bytes() - before

    def _raise_if_any(self, error: TasukiError | None, woken: Sequence[MemoryTag], *, of: Sequence[str] | None = None) -> None:
        """Raises on every rank the error of any rank, and undoes what the others have done.

        of: the arenas to name in the error, if they do not exist yet.
        """
        lacking = isinstance(error, OutOfGpuMemory)
        numbers = [int(error.metadata["needed_bytes"]), int(error.metadata["free_bytes"])] if lacking and error else [0, 0]
        mine = torch.tensor([error is not None, *numbers], dtype=torch.int64, device=self._device)
        everyone = [torch.empty_like(mine) for _ in range(self._mesh.size())]
        dist.all_gather(everyone, mine, group=self._mesh.get_group("dp"))
        failures = [(rank, *values) for rank, (failed, *values) in enumerate(one.tolist() for one in everyone) if failed]
        if not failures:
            return
        if error is not None and not lacking:
            raise error
        if error is None:
            self.pause_tags(woken, makes_room=True)
        rank, needed, free = max(failures, key=lambda failure: failure[1] - failure[2])
        tags = woken if of is None else of
        raise OutOfGpuMemory(
            f"trainer rank {rank} needs {needed} bytes for {', '.join(tags)}; {free} are free",
            tag=",".join(tags),
            needed_bytes=needed,
            free_bytes=free,
            rank=rank,
        ) from error

    def _mapped_bytes(self) -> int:
        return sum(usage.mapped_bytes for usage in self._allocator.usage())


class Publication:
    """Publishes, with the memory that `memory` keeps for it."""

    def __init__(
        self,
        memory: TrainerMemory,
        make: Callable[[ExportMemory], WeightExport],
        *,
        replaced: Callable[[], Replaced | None] = lambda: None,
    ) -> None:
        """replaced: content in the place of some shards, once `make` has been called."""
        self._memory, self._make, self._replaced = memory, make, replaced
        self._export: WeightExport | None = None

    def publish(self, policy_version: int) -> RankPublished:
        """Collective. Raises OutOfGpuMemory."""
        started = time.perf_counter()
        self._export = self._memory.export(self._make)
        mapped = time.perf_counter()
        num_bytes = self._export.publish(policy_version, replaced=self._replaced())
        self._memory.make_room()
        seconds = mapped - started, time.perf_counter() - mapped
        _log.info("event=published policy_version=%d bytes=%d map_s=%.4f write_s=%.4f", policy_version, num_bytes, *seconds)
        return RankPublished(handle=self._export.handle(), published_bytes=num_bytes)

    def rehearse(self) -> None:
        """Publishes and withdraws, which loads kernels. Keeps the memory if it stays during OFFLOAD. Raises OutOfGpuMemory."""
        self._export = self._memory.export(self._make)
        self._export.publish(0, replaced=self._replaced())
        self.withdraw()
        self._memory.release_export()

    def try_rehearsal(self) -> None:
        """Same; logs if there is no room."""
        try:
            self.rehearse()
        except OutOfGpuMemory as error:
            _log.warning("event=not_warm reason=%s error=%s", error.reason, error.message)

    def withdraw(self) -> None:
        if self._export is not None:
            self._export.withdraw()
            self._memory.restore_base()

    def damage(self) -> None:
        """Injects a fault for tests of recovery."""
        assert self._export is not None
        self._export.damage()

    def close(self) -> None:
        """Nobody else receives the weights from now on."""
        if self._export is not None:
            self._export.close()
