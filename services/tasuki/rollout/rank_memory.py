"""One engine rank's memory: arenas by tag, and the content that must outlive a pause because no sync brings it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch

from tasuki.memory.allocator import NativeAllocator
from tasuki.memory.arena import ArenaState
from tasuki.memory.pool import pool_usage
from tasuki.memory.tags import MemoryTag, TagUsage
from tasuki.rollout.record import EngineModel
from tasuki.transport.shared_base import SharedBase

if TYPE_CHECKING:
    from tasuki.rollout.growing_cache import GrowingCache

# Beside the cache itself SGLang keeps tables of its layers' addresses in the same region.
_MAX_CACHE_TABLE_BYTES = 64 * 1024
# What is used only while tokens are generated sleeps together.
_TOGETHER = {MemoryTag.KV_CACHE: (MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH)}

Span = tuple[int, int]
"""Address and bytes."""


def rank_allocator(device: str, *, chunk_bytes: Mapping[MemoryTag, int] = MappingProxyType({})) -> NativeAllocator:
    """Arenas for what an engine rank holds; nothing is kept by the arenas themselves. device: "cpu" or "cuda:<number>".

    chunk_bytes: size of a tag's chunks, where it is not the default.
    """
    tags = [MemoryTag.WEIGHTS, MemoryTag.KV_CACHE]
    # On a CPU nothing is captured.
    return NativeAllocator(
        tags=tags if device == "cpu" else [*tags, MemoryTag.CUDA_GRAPH], device=device, chunk_bytes=chunk_bytes
    )


class RankMemory:
    """Pauses and resumes a rank's tags. Parameters come back by a sync, the KV cache empty, and everything else as it was.

    slot_table: SGLang's map from requests to cache slots, which lies in the cache's region and must never hold slots that do not exist.
    staying: tags that never sleep, whatever is asked. cache: where a resume of the KV cache takes only the least of it.
    base: with the parameters, where the trainer reads them, too; counted here, and by nobody else.
    """

    def __init__(
        self,
        allocator: NativeAllocator,
        model: EngineModel,
        *,
        slot_table: torch.Tensor | None = None,
        staying: frozenset[MemoryTag] = frozenset(),
        cache: GrowingCache | None = None,
        base: SharedBase | None = None,
    ) -> None:
        self._base_bytes = 0 if base is None else base.num_bytes
        self._cache = cache
        self._allocator, self._model, self._slot_table, self._staying = allocator, model, slot_table, staying
        # New memory of a host is zeros; what a pool lends, or a GPU gives, holds what was there before.
        self._is_zeroed = allocator.device == "cpu" and pool_usage("cpu") is None
        self._kept = {tag: _Kept() for tag in (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)}
        self._found: dict[MemoryTag, tuple[tuple[int, int], list[Span]]] = {}

    def pause(self, tags: Sequence[MemoryTag]) -> int:
        """Gives the pages back and returns their bytes. Nothing may use them: no request runs."""
        tags = self._all_of(tags)
        for tag in tags:
            if tag in self._kept and not self._is_paused(tag):
                self._kept[tag].save(self._spans_to_keep(tag), device=self._allocator.device)
        return self._allocator.pause(tags)

    def resume(self, tags: Sequence[MemoryTag]) -> int:
        """Takes pages at the same addresses and returns their bytes. Raises OutOfGpuMemory with every tag still asleep."""
        tags = self._all_of(tags)
        woken = [tag for tag in tags if self._is_paused(tag)]
        if MemoryTag.KV_CACHE in woken and self._cache is not None:
            self._cache.reset()
        mapped = self._allocator.resume(tags)
        for tag in woken:
            if tag in self._kept:
                self._kept[tag].restore()
        if MemoryTag.KV_CACHE in woken and self._slot_table is not None and not self._is_zeroed:
            self._slot_table.zero_()
        if woken and self._allocator.device != "cpu":
            torch.cuda.synchronize(self._allocator.device)
        return mapped

    def usage(self) -> list[TagUsage]:
        return [
            replace(
                usage,
                mapped_bytes=usage.mapped_bytes + self._outside(usage.tag),
                total_bytes=usage.total_bytes + self._outside(usage.tag),
                host_copy_bytes=usage.host_copy_bytes + (self._kept[usage.tag].host_bytes if usage.tag in self._kept else 0),
                stays=usage.tag in self._staying,
                following_bytes=self._cache.following_bytes if self._cache and usage.tag is MemoryTag.KV_CACHE else 0,
            )
            for usage in self._allocator.usage()
        ]

    def _outside(self, tag: MemoryTag) -> int:
        """Bytes of a tag that lie in no arena."""
        return self._base_bytes if tag is MemoryTag.WEIGHTS else 0

    def _all_of(self, tags: Sequence[MemoryTag]) -> list[MemoryTag]:
        wanted = [each for tag in tags for each in _TOGETHER.get(tag, (tag,))]
        return [tag for tag in wanted if (tag in self._allocator.tags or tag in tags) and tag not in self._staying]

    def _is_paused(self, tag: MemoryTag) -> bool:
        return self._allocator.arena(tag).usage().state in (ArenaState.PAUSED, ArenaState.PAUSING)

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
            rows = () if self._cache is None else self._cache.addresses
            return [span for span in blocks if span[1] <= _MAX_CACHE_TABLE_BYTES and span[0] not in rows]
        return without(blocks, [_span(parameter.data) for _, parameter in self._model.named_parameters()])


class _Kept:
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
    view = _MemoryView(span)
    return torch.from_numpy(np.asarray(view)) if device == "cpu" else torch.as_tensor(view, device=device)


class _MemoryView:
    def __init__(self, span: Span) -> None:
        address, num_bytes = span
        self.__array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
        self.__cuda_array_interface__ = self.__array_interface__


def _span(tensor: torch.Tensor) -> Span:
    """From the tensor's first byte to its last."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()
