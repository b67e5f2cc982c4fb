"""What both services ask of pausable memory, and the allocator that keeps books without freeing anything."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class MemoryTag(StrEnum):
    """A named class of memory that is paused and resumed as a whole."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"


@dataclass(frozen=True, slots=True)
class TagUsage:
    """One tag on one device. Bytes."""

    tag: MemoryTag
    device: str
    mapped_bytes: int
    total_bytes: int
    is_paused: bool


class Allocator(Protocol):
    """Memory of one process by tag. Pause and resume are idempotent and all-or-nothing."""

    @property
    def frees_memory(self) -> bool:
        """Whether a pause gives pages back to the system."""
        ...

    def region(self, tag: MemoryTag) -> AbstractContextManager[None]:
        """Tensors made inside belong to `tag`."""
        ...

    def pause(self, tags: Sequence[MemoryTag]) -> int:
        """Gives the pages of `tags` back, keeping addresses. Returns the bytes released; 0 for tags that are paused already."""
        ...

    def resume(self, tags: Sequence[MemoryTag]) -> int:
        """Takes pages for `tags` at the same addresses. Returns the bytes mapped; raises OutOfGpuMemory and changes nothing."""
        ...

    def usage(self) -> list[TagUsage]: ...


class ResidentAllocator:
    """Keeps the books of pause and resume and frees nothing: the pages of a paused tag stay where they are."""

    frees_memory = False

    def __init__(self, *, tags: Sequence[MemoryTag], device: str) -> None:
        self._device = device
        self._is_paused = dict.fromkeys(tags, False)
        self._total_bytes = dict.fromkeys(tags, 0)

    def set_total_bytes(self, tag: MemoryTag, total_bytes: int) -> None:
        """Tells the size of a tag, which this allocator cannot see by itself."""
        self._total_bytes[tag] = total_bytes

    def region(self, tag: MemoryTag) -> AbstractContextManager[None]:
        return nullcontext()

    def pause(self, tags: Sequence[MemoryTag]) -> int:
        self._is_paused.update(dict.fromkeys(tags, True))
        return 0

    def resume(self, tags: Sequence[MemoryTag]) -> int:
        self._is_paused.update(dict.fromkeys(tags, False))
        return 0

    def usage(self) -> list[TagUsage]:
        return [
            TagUsage(tag=tag, device=self._device, mapped_bytes=total, total_bytes=total, is_paused=self._is_paused[tag])
            for tag, total in self._total_bytes.items()
        ]
