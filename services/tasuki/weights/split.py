"""Splits the pieces of a copy plan at the boundaries of trainer ranks' slices. Pure arithmetic."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul

from tasuki.weights.manifest import Box, Entry
from tasuki.weights.plan import Piece, Slice, whole


@dataclass(frozen=True, slots=True)
class Copy:
    """The part of a piece in one trainer rank's slice.

    source: relative to the first element of `entry`. where: the same elements' indices in the whole tensor.
    """

    entry: Entry
    source: Slice
    where: Slice
    destination: Slice


@dataclass(frozen=True, slots=True)
class _Level:
    """A dimension of a trainer rank's slice. Dimensions that the slice covers fully are merged into the one before.

    size: of the whole tensor. start, length: of the slice. pitch, local_pitch: elements between consecutive indices in either.
    """

    size: int
    start: int
    length: int
    pitch: int = 1
    local_pitch: int = 1


def indices_of(entry: Entry) -> Slice:
    """Indices of the entry's elements in the whole tensor."""
    strides = whole(entry.global_shape).strides
    return Slice(sum(map(mul, entry.offsets, strides)), entry.sizes, strides)


def split_by_entries(piece: Piece, entries: Sequence[Entry]) -> list[Copy]:
    """Splits a piece at the boundaries of trainer ranks' slices.

    entries: of the piece's tensor over all ranks, without gaps.
    """
    boxes = tuple(entry.box for entry in entries)
    parts = _split(piece.source, piece.destination, entries[0].global_shape, boxes)
    return [Copy(entries[index], *slices) for index, *slices in parts]


@functools.lru_cache(maxsize=1 << 12)
def _split(
    source: Slice, destination: Slice, shape: tuple[int, ...], boxes: tuple[Box, ...]
) -> tuple[tuple[int, Slice, Slice, Slice], ...]:
    """Box and, as in a Copy, the slices of each part. Cached because layers repeat."""
    parts: list[tuple[int, Slice, Slice, Slice]] = []
    for index, box in enumerate(boxes):
        parts += [(index, *slices) for slices in _split_by_box((source, destination), shape, box)]
    return tuple(parts)


def _split_by_box(sides: tuple[Slice, Slice], shape: tuple[int, ...], box: Box) -> Iterator[tuple[Slice, Slice, Slice]]:
    levels = _levels(shape, box)
    if len(levels) == 1:
        # Rows are also contiguous in the whole tensor.
        first, last = levels[0].start, levels[0].start + levels[0].length
        for where, target in _within(sides, 0, first, last):
            yield Slice(where.offset - first, where.shape, where.strides), where, target
        return
    for source, destination in _unwound(sides, levels):
        parts = [(*_coordinates(source, levels), destination)]
        for judged, level in enumerate(levels):
            parts = [cut for part in parts for cut in _within(part, judged, level.start, level.start + level.length)]
        for *coordinates, target in parts:
            local = _joined(coordinates, [(level.start, level.local_pitch) for level in levels])
            where = _joined(coordinates, [(0, level.pitch) for level in levels])
            yield local, where, target


def _levels(shape: tuple[int, ...], box: Box) -> list[_Level]:
    """Levels, outermost first. Rows have a single level whose indices are those of the elements."""
    levels: list[_Level] = []
    for size, start, length in zip(reversed(shape), reversed(box.offsets), reversed(box.sizes), strict=True):
        if not levels:
            levels.append(_Level(size, start, length))
            continue
        inner = levels[-1]
        if length == 1 or inner.length == inner.size:
            first, numel = start * inner.size + inner.start, length * inner.length
            levels[-1] = _Level(size * inner.size, first, numel, inner.pitch, inner.local_pitch)
        else:
            levels.append(_Level(size, start, length, inner.pitch * inner.size, inner.local_pitch * inner.length))
    return levels[::-1]


def _unwound(sides: tuple[Slice, ...], levels: Sequence[_Level]) -> Iterator[tuple[Slice, ...]]:
    """Splits a copy into parts in which a step along any dimension changes the coordinate of only one level.

    sides: of equal shape, source first. Copies along the tensor's dimensions need no splitting; a run of a flattened tensor becomes at most
    three parts per level.
    """
    if sides[0].numel == 0:
        return
    for level, at in zip(levels[1:], _coordinates(sides[0], levels)[1:], strict=True):
        if at.end > level.size:
            for part in _parted(sides, at, level.size):
                yield from _unwound(part, levels)
            return
    yield sides


def _coordinates(source: Slice, levels: Sequence[_Level]) -> list[Slice]:
    """Index of the source in each level, with stride 0 along dimensions of other levels."""
    coordinates: list[Slice] = []
    outside, strides = 0, source.strides
    for level in levels:
        offset = (source.offset % outside if outside else source.offset) // level.pitch
        steps = tuple(0 if stride % level.pitch else stride // level.pitch for stride in strides)
        strides = tuple(stride if stride % level.pitch else 0 for stride in strides)
        coordinates.append(Slice(offset, source.shape, steps))
        outside = level.pitch
    return coordinates


def _parted(sides: tuple[Slice, ...], at: Slice, size: int) -> Iterator[tuple[Slice, ...]]:
    """Splits a copy where its coordinate `at` passes a level's `size` into the next outer index."""
    dim = _outermost(at)
    stride, count = at.strides[dim], at.shape[dim]
    extent = at.selected(dim, 0).end - at.offset
    steps, rest = divmod(size, stride)
    if rest == 0 and at.offset + extent <= stride:
        first = count // steps * steps
        yield tuple(side.narrowed(dim, 0, first).unflattened(dim, steps) for side in sides)
    else:
        first = max(1, (size - extent - at.offset) // stride + 1)
        yield tuple(side.narrowed(dim, 0, first) for side in sides)
    yield tuple(side.narrowed(dim, first, count - first) for side in sides)


def _outermost(at: Slice) -> int:
    """The dimension with the largest step."""
    return max(range(len(at.shape)), key=lambda dim: at.strides[dim] if at.shape[dim] > 1 else -1)


def _joined(coordinates: Sequence[Slice], levels: Sequence[tuple[int, int]]) -> Slice:
    """Elements from their indices in each level. levels: first index and pitch of each."""
    offset = sum((at.offset - start) * pitch for at, (start, pitch) in zip(coordinates, levels, strict=True))
    steps = [[stride * pitch for stride in at.strides] for at, (_, pitch) in zip(coordinates, levels, strict=True)]
    return Slice(offset, coordinates[0].shape, tuple(map(sum, zip(*steps, strict=True))))


def _within(slices: tuple[Slice, ...], judged: int, first: int, last: int) -> list[tuple[Slice, ...]]:
    """Parts of `slices`, all of one shape, in which the elements of slices[judged] lie in [first, last)."""
    at = slices[judged]
    if at.numel == 0 or at.end <= first or at.offset >= last:
        return []
    if at.offset >= first and at.end <= last:
        return [slices]
    dim = _outermost(at)
    stride, size = at.strides[dim], at.shape[dim]
    extent = at.selected(dim, 0).end - at.offset
    # Along `dim`, indices [touch, done) have some elements inside, and [enter, leave) have only such elements.
    touch = max(0, (first - extent - at.offset) // stride + 1)
    enter = min(size, max(0, -((at.offset - first) // stride)))
    leave = min(size, max(enter, (last - extent - at.offset) // stride + 1))
    done = min(size, -((at.offset - last) // stride))
    parts: list[tuple[Slice, ...]] = []
    for index in [*range(touch, enter), *range(leave, done)]:
        parts += _within(tuple(side.selected(dim, index) for side in slices), judged, first, last)
    if leave > enter:
        parts.append(tuple(side.narrowed(dim, enter, leave - enter) for side in slices))
    return parts
