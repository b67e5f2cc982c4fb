"""Bytes that tensors really take: torch's segments, and the chunks of our arenas under them."""

import functools
from collections.abc import Iterable

_MIB = 2**20
# c10/cuda/CUDACachingAllocator: small tensors share segments of 2 MiB, larger ones of 20 MiB, the largest have their own.
_BLOCK = 512
_SMALL, _SMALL_SEGMENT = _MIB, 2 * _MIB
_LARGE, _LARGE_SEGMENT, _SEGMENT_STEP = 10 * _MIB, 20 * _MIB, 2 * _MIB
# csrc/chunks.cpp and the defaults of csrc/arena.h: a chunk ahead of need is an eighth of what is there.
_MIN_CHUNK, _MAX_CHUNK, _GROWTH_PART = 64 * _MIB, 1024 * _MIB, 8
# memory/arena.py and region.py.
_CPU_MIN_CHUNK, _CPU_MAX_CHUNK, CPU_MIN_TENSOR = 2 * _MIB, 64 * _MIB, 2048
ALIGNMENT = 256
"""Alignment of tensors that share a buffer, in bytes."""


def rounded_up(num_bytes: int, step: int) -> int:
    return -(-num_bytes // step) * step


@functools.lru_cache(maxsize=256)  # a search plans the same tensors a hundred times
def arena_bytes(tensors: tuple[int, ...], *, device: str = "cuda") -> int:
    """Physical bytes of an arena after tensors of these bytes were made in it, in this order. On a CPU small ones stay outside."""
    if device == "cuda":
        return _chunk_bytes(_segments(tensors), least=_MIN_CHUNK, most=_MAX_CHUNK)
    blocks = (rounded_up(tensor, _BLOCK) for tensor in tensors if tensor >= CPU_MIN_TENSOR)
    return _chunk_bytes(blocks, least=_CPU_MIN_CHUNK, most=_CPU_MAX_CHUNK)


def _chunk_bytes(blocks: Iterable[int], *, least: int, most: int) -> int:
    end = chunks = 0
    for block in blocks:
        end += block
        chunks += max(0, end - chunks) // most * most
        while chunks < end:
            wanted = max(end - chunks, chunks // _GROWTH_PART)
            chunks += min(rounded_up(wanted, least), most)
    return chunks


def export_bytes(num_bytes: int, *, device: str = "cuda") -> int:
    """Physical bytes of an arena for copies that are published: `equal_chunks`."""
    blocks = [rounded_up(num_bytes, _BLOCK)]
    return _chunk_bytes(blocks, least=_SEGMENT_STEP, most=equal_chunks(num_bytes, device=device))


def equal_chunks(num_bytes: int, *, device: str) -> int:
    """Size of the equal chunks that hold one block with little to spare, each a descriptor, none above the size that is quick to map."""
    num_chunks = max(1, -(-num_bytes // (_CPU_MAX_CHUNK if device == "cpu" else _MAX_CHUNK)))
    return max(_SEGMENT_STEP, rounded_up(num_bytes, num_chunks * _SEGMENT_STEP) // num_chunks)


def _segments(tensors: Iterable[int]) -> Iterable[int]:
    """Segments that torch allocates for these tensors: the smallest sufficient gap is used, else a new segment."""
    gaps: dict[int, list[int]] = {_SMALL_SEGMENT: [], _LARGE_SEGMENT: []}
    for tensor in tensors:
        block = rounded_up(tensor, _BLOCK)
        if not block:
            continue
        segment = _SMALL_SEGMENT if block <= _SMALL else _LARGE_SEGMENT
        fitting = [gap for gap in gaps[segment] if gap >= block]
        if fitting:
            gap = min(fitting)
            gaps[segment].remove(gap)
        else:
            gap = rounded_up(block, _SEGMENT_STEP) if block >= _LARGE else segment
            yield gap
        # A rest of at most 1 MiB of a large segment stays with its block.
        if gap - block > (0 if segment == _SMALL_SEGMENT else _SMALL):
            gaps[segment].append(gap - block)
