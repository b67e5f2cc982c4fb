"""Moves arenas that a test created directly, as the allocator that would own them."""

from collections.abc import Sequence

from tasuki.memory.arena import Arena, NativeAllocator, Transfer
from tasuki.wire.stages import MemoryTag


def pause(arenas: Sequence[Arena]) -> int:
    return _adopting(arenas).pause(_tags(arenas))


def resume(arenas: Sequence[Arena]) -> int:
    return _adopting(arenas).resume(_tags(arenas))


def resume_async(arenas: Sequence[Arena]) -> Transfer:
    return _adopting(arenas).resume_async(_tags(arenas))


def _adopting(arenas: Sequence[Arena]) -> NativeAllocator:
    allocator = NativeAllocator(tags=[], device="cpu")
    for tag, arena in dict(zip(_tags(arenas), arenas, strict=True)).items():
        allocator.adopt(tag, arena)
    return allocator


def _tags(arenas: Sequence[Arena]) -> list[MemoryTag]:
    return [MemoryTag(arena.tag) for arena in arenas]
