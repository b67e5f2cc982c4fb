"""One trainer rank's memory: parameters, gradients and optimizer state, each in the arena of its tag."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from tasuki.memory.allocator import NativeAllocator
from tasuki.memory.arena import Keep, Transfer
from tasuki.memory.device_usage import device_usage
from tasuki.memory.tags import DeviceUsage, MemoryTag, TagUsage
from tasuki.trainer.mesh import mesh_device
from tasuki.wire.errors import OutOfGpuMemory, TasukiError

TAGS = (MemoryTag.WEIGHTS, MemoryTag.GRADIENTS, MemoryTag.OPTIMIZER)
# Nothing is offloaded while gradients are pending, so there is nothing to keep of them.
_KEEP = {MemoryTag.WEIGHTS: Keep.CONTENT, MemoryTag.OPTIMIZER: Keep.CONTENT}


class TrainerMemory:
    """Pausable memory of one rank. Tensors keep their addresses from their making to the end of the process."""

    def __init__(self, mesh: DeviceMesh) -> None:
        device = mesh_device(mesh)
        self._mesh, self._device = mesh, device
        self._allocator = NativeAllocator(tags=TAGS, device=str(device), keep=_KEEP)
        self._gradients: list[Tensor] = []
        self._optimizer_transfer: Transfer | None = None

    def region(self, tag: MemoryTag) -> AbstractContextManager[None]:
        """Tensors made inside belong to `tag`."""
        return self._allocator.region(tag)

    def make_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Gives every parameter a gradient of zeros, into which FSDP2 adds from then on, in the same place."""
        with self.region(MemoryTag.GRADIENTS):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
                self._gradients.append(cast(DTensor, parameter.grad).to_local())

    @property
    def gradients(self) -> list[Tensor]:
        """This rank's shards."""
        return self._gradients

    def make_adamw_state(self, optimizer: torch.optim.AdamW) -> None:
        """What AdamW would make at its first step."""
        with self.region(MemoryTag.OPTIMIZER):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter] = {
                        "step": torch.zeros(()),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }

    def pause(self, tags: Sequence[MemoryTag]) -> int:
        """Gives the pages of `tags` back; parameters and optimizer state move to host memory. Returns the bytes released."""
        self.wait_for_optimizer()
        released = self._allocator.pause(tags)
        if self._device.type == "cuda":
            # What torch only caches nobody else could take.
            torch.cuda.empty_cache()
        return released

    def resume(self, tags: Sequence[MemoryTag]) -> int:
        """Takes pages for `tags` and brings their content back. Returns the bytes mapped.

        The optimizer's content is still on its way on return, see `wait_for_optimizer`. Every rank must call it. Raises OutOfGpuMemory on
        all ranks, with every tag asleep as before, when one of them has no room.
        """
        slept = [usage.tag for usage in self._allocator.usage() if usage.is_paused and usage.tag in tags]
        error: TasukiError | None = None
        mapped = 0
        try:
            mapped = self._take_pages(slept)
        except TasukiError as raised:
            error = raised
        self._raise_if_any(error, slept)
        if MemoryTag.GRADIENTS in slept:
            self.clear_gradients()
        return mapped

    def wait_for_optimizer(self) -> None:
        """Returns when the optimizer state has its content."""
        transfer, self._optimizer_transfer = self._optimizer_transfer, None
        if transfer is not None:
            transfer.wait()

    @torch.no_grad()
    def clear_gradients(self) -> None:
        torch._foreach_zero_(self._gradients)

    def usage(self) -> list[TagUsage]:
        return self._allocator.usage()

    def device_usage(self) -> DeviceUsage:
        return device_usage(str(self._device), self._mesh.get_local_rank())

    def _take_pages(self, tags: Sequence[MemoryTag]) -> int:
        others = [tag for tag in tags if tag is not MemoryTag.OPTIMIZER]
        before = self._mapped_bytes()
        self._allocator.resume(others)
        if MemoryTag.OPTIMIZER in tags:
            try:
                self._optimizer_transfer = self._allocator.resume_async([MemoryTag.OPTIMIZER])
            except TasukiError:
                self._allocator.pause(others)
                raise
        return self._mapped_bytes() - before

    def _raise_if_any(self, error: TasukiError | None, woken: Sequence[MemoryTag]) -> None:
        """Raises on every rank what one of them met, and undoes on the others what they have done."""
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
            self.pause(woken)
        rank, needed, free = max(failures, key=lambda failure: failure[1] - failure[2])
        raise OutOfGpuMemory(
            f"trainer rank {rank} needs {needed} bytes for {', '.join(woken)}; {free} are free",
            tag=",".join(woken),
            needed_bytes=needed,
            free_bytes=free,
            rank=rank,
        ) from error

    def _mapped_bytes(self) -> int:
        return sum(usage.mapped_bytes for usage in self._allocator.usage())
