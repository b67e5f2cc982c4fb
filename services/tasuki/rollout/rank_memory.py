"""Memory of one engine rank: pause and resume of its tags, and what is saved of them over a pause."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tasuki.memory.arena import ArenaState, NativeAllocator
from tasuki.rollout.record import EngineModel
from tasuki.v1 import memory_pb2, types_pb2
from tasuki.v1.types_pb2 import TagUsage
from tasuki.weights.chunk_memory import storage_at
from tasuki.weights.shared_base import SharedBase
from tasuki.wire.errors import Busy
from tasuki.wire.stages import MemoryTag

if TYPE_CHECKING:
    from tasuki.rollout.sglang.scheduler import RankScheduler

# Beside the cache itself SGLang keeps tables of its layers' addresses in the same region.
_MAX_CACHE_TABLE_BYTES = 64 * 1024
# What is used only while tokens are generated sleeps together.
_TOGETHER = {MemoryTag.KV_CACHE: (MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH)}


Span = tuple[int, int]
"""Address and bytes."""


class KeptContent:
    """A host copy of spans of device memory, over a pause. On a GPU it is pinned, taken once and reused."""

    def __init__(self) -> None:
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._host = torch.empty(0, dtype=torch.uint8)

    @property
    def host_bytes(self) -> int:
        return self._host.numel()

    def save(self, spans: Sequence[Span], *, device: str) -> None:
        """Starts the copies; they are done when the device is idle, which a pause waits for before it takes pages."""
        total_bytes = sum(num_bytes for _, num_bytes in spans)
        if self._host.numel() != total_bytes:
            self._host = torch.empty(total_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
        copies = self._host.split([num_bytes for _, num_bytes in spans])
        self._pieces = [(memory_at(span, device=device), copy) for span, copy in zip(spans, copies, strict=True)]
        for memory, copy in self._pieces:
            copy.copy_(memory, non_blocking=True)

    def restore(self) -> None:
        for memory, copy in self._pieces:
            memory.copy_(copy, non_blocking=True)


def without(blocks: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """The parts of `blocks` that lie in none of `holes`, in the order of their addresses."""
    left: list[Span] = []
    ends = sorted((start, start + num_bytes) for start, num_bytes in holes)
    for start, num_bytes in sorted(blocks):
        at, end = start, start + num_bytes
        for hole_start, hole_end in ends:
            if hole_end <= at:
                continue
            if hole_start >= end:
                break
            if hole_start > at:
                left.append((at, hole_start - at))
            at = hole_end
        if at < end:
            left.append((at, end - at))
    return left


def memory_at(span: Span, *, device: str) -> torch.Tensor:
    """The bytes at an address as a tensor that does not own them."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage_at(*span, device=torch.device(device)))


def span_of(tensor: torch.Tensor) -> Span:
    """From the tensor's first byte to its last."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def rank_allocator(device: str) -> NativeAllocator:
    """Arenas for what an engine rank holds; nothing is kept by the arenas themselves. device: "cpu" or "cuda:<number>"."""
    tags = [MemoryTag.WEIGHTS, MemoryTag.KV_CACHE]
    # On a CPU nothing is captured.
    return NativeAllocator(tags=tags if device == "cpu" else [*tags, MemoryTag.CUDA_GRAPH], device=device)


class RankMemory:
    """Pauses and resumes a rank's tags. Parameters come back by a sync, the KV cache empty, and everything else as it was.

    scheduler: None for a model without an engine. Its map from requests to cache slots must never hold slots that do not exist.
    staying: tags that never sleep, whatever is asked.
    base: holds the parameters where the trainer reads them too; counted here alone.
    """

    def __init__(
        self,
        allocator: NativeAllocator,
        model: EngineModel,
        *,
        scheduler: "RankScheduler | None" = None,
        staying: frozenset[MemoryTag] = frozenset(),
        base: SharedBase | None = None,
    ) -> None:
        self._base_bytes = 0 if base is None else base.num_bytes
        self._allocator, self._model, self._scheduler, self._staying = allocator, model, scheduler, staying
        # New memory of a host is zeros; that of a GPU holds what was there before.
        self._is_zeroed = allocator.device == "cpu"
        self._kept = {tag: KeptContent() for tag in (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)}
        self._found: dict[MemoryTag, tuple[tuple[int, int], list[Span]]] = {}

    def pause(self, request: memory_pb2.PauseRequest) -> memory_pb2.PauseResponse:
        """Evicts every cached prefix and gives the pages of the tags back.

        Raises Busy while a request runs, and until the scheduler has noticed that the last one ended.
        """
        if self._scheduler is not None and not self._scheduler.flush():
            raise Busy("requests run", num_running=self._scheduler.num_running)
        tags = self._all_of(request.tags)
        for tag in tags:
            if tag in self._kept and not self._is_paused(tag):
                self._kept[tag].save(self._spans_to_keep(tag), device=self._allocator.device)
        return memory_pb2.PauseResponse(released_bytes=self._allocator.pause(tags))

    def resume(self, request: memory_pb2.ResumeRequest) -> memory_pb2.ResumeResponse:
        """Takes pages at the same addresses. Raises OutOfGpuMemory with every tag still asleep."""
        tags = self._all_of(request.tags)
        woken = [tag for tag in tags if self._is_paused(tag)]
        mapped = self._allocator.resume(tags)
        for tag in woken:
            if tag in self._kept:
                self._kept[tag].restore()
        if MemoryTag.KV_CACHE in woken and self._scheduler is not None and not self._is_zeroed:
            self._scheduler.forget_slots()
        if woken and self._allocator.device != "cpu":
            torch.cuda.synchronize(self._allocator.device)
        return memory_pb2.ResumeResponse(mapped_bytes=mapped)

    def usage(self) -> list[TagUsage]:
        usages = self._allocator.usage()
        for usage in usages:
            tag = MemoryTag.known(usage.tag)
            usage.mapped_bytes += self._outside(tag)
            usage.total_bytes += self._outside(tag)
            usage.host_copy_bytes += self._kept[tag].host_bytes if tag in self._kept else 0
            usage.stays = tag in self._staying
        return usages

    def _outside(self, tag: MemoryTag) -> int:
        """Bytes of a tag that are in no arena."""
        return self._base_bytes if tag is MemoryTag.WEIGHTS else 0

    def _all_of(self, named: Sequence[types_pb2.MemoryTag.ValueType]) -> list[MemoryTag]:
        tags = MemoryTag.all_of(named)
        wanted = [each for tag in tags for each in _TOGETHER.get(tag, (tag,))]
        return [tag for tag in wanted if (tag in self._allocator.tags or tag in tags) and tag not in self._staying]

    def _is_paused(self, tag: MemoryTag) -> bool:
        return self._allocator.arena(tag).usage().state is ArenaState.PAUSED

    def _spans_to_keep(self, tag: MemoryTag) -> list[Span]:
        """Looked for again only when something was freed: nothing is made in a region once the engine is built."""
        usage = self._allocator.arena(tag).usage()
        seen = (usage.num_blocks, usage.used_bytes)
        if tag not in self._found or self._found[tag][0] != seen:
            self._found[tag] = seen, self._find_spans_to_keep(tag)
        return self._found[tag][1]

    def _find_spans_to_keep(self, tag: MemoryTag) -> list[Span]:
        blocks = self._allocator.blocks(tag)
        if tag is MemoryTag.KV_CACHE:
            return [span for span in blocks if span[1] <= _MAX_CACHE_TABLE_BYTES]
        return without(blocks, [span_of(parameter.data) for _, parameter in self._model.named_parameters()])
