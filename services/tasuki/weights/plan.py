"""A copy plan: maps slices of checkpoint tensors to slices of engine parameters. Pure data and arithmetic."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tasuki.wire.errors import WeightsCorrupt


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements of a contiguous tensor: `offset` of the first, `shape` and `strides`, all in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """One past the last element; `offset` if empty. Strides must not be negative."""
        if self.numel == 0:
            return self.offset
        return self.offset + 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def narrowed(self, dim: int, start: int, length: int) -> "Slice":
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return Slice(self.offset + start * self.strides[dim], shape, self.strides)

    def unflattened(self, dim: int, size: int) -> "Slice":
        """Splits `dim` into two dimensions, the inner one of `size`."""
        stride = self.strides[dim]
        shape = (*self.shape[:dim], self.shape[dim] // size, size, *self.shape[dim + 1 :])
        return Slice(self.offset, shape, (*self.strides[:dim], stride * size, stride, *self.strides[dim + 1 :]))

    def selected(self, dim: int, index: int) -> "Slice":
        """Selects `index` of `dim` and drops that dimension."""
        offset = self.offset + index * self.strides[dim]
        return Slice(offset, self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :])


def whole(shape: Sequence[int], *, offset: int = 0) -> Slice:
    """All elements of a contiguous tensor of `shape` that starts at `offset`."""
    return Slice(offset, tuple(shape), tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))))


@dataclass(frozen=True, slots=True)
class Piece:
    """One copy of the engine's loader: from a slice of the checkpoint tensor `name` to a slice of `parameter`."""

    name: str
    source: Slice
    parameter: str
    destination: Slice


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant slice of a parameter, such as the padding rows of a vocabulary."""

    parameter: str
    destination: Slice
    value: float


@dataclass(frozen=True, slots=True)
class FallbackWrite:
    """A slice of a parameter written by the engine's own loader in each sync, from tensors that a plan cannot express."""

    parameter: str
    destination: Slice


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Everything needed to turn published tensors into one engine rank's parameters."""

    pieces: tuple[Piece, ...]
    constants: tuple[Constant, ...]
    fallback_names: tuple[str, ...]
    fallback_writes: tuple[FallbackWrite, ...]


def held_slice(pieces: Sequence[Piece], shape: Sequence[int]) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """Start in one parameter, offsets and sizes of the slice of a tensor that these pieces form; None if they form none, or lie apart."""
    first, strides, rows = pieces[0], whole(shape).strides, 0
    width = first.source.shape[1:]
    for piece in pieces:
        num_rows = piece.source.shape[0]
        source = Slice(first.source.offset + rows * strides[0], (num_rows, *width), strides)
        if piece.source != source:
            return None
        if piece.destination != whole(source.shape, offset=first.destination.offset + rows * math.prod(width)):
            return None
        rows += num_rows
    offsets = tuple(first.source.offset // stride % size for stride, size in zip(strides, shape, strict=True))
    return first.destination.offset, offsets, (rows, *width)


def check_coverage(plan: CopyPlan, parameter_numels: Mapping[str, int]) -> None:
    """Raises WeightsCorrupt naming a parameter unless every element of every parameter is written exactly once."""
    writes: dict[str, list[Slice]] = {parameter: [] for parameter in parameter_numels}
    for write in (*plan.pieces, *plan.constants, *plan.fallback_writes):
        writes[write.parameter].append(write.destination)
    for parameter, numel in parameter_numels.items():
        missing, repeated = count_uncovered(numel, writes[parameter])
        if missing or repeated:
            raise WeightsCorrupt(
                f"{parameter}: of {numel} elements {missing} are not written and {repeated} are written more than once",
                tensors=parameter,
            )


def count_uncovered(numel: int, slices: Sequence[Slice]) -> tuple[int, int]:
    """Number of the `numel` elements that no slice covers, and that several cover.

    Counts groups of elements that all slices cover alike, so that many gigabytes of weights need only kilobytes.
    """
    return _count_uncovered(numel, tuple(slice_ for slice_ in slices if slice_.numel))


# Cached because the same plan is checked in every sync.
@functools.lru_cache(maxsize=1 << 16)
def _count_uncovered(numel: int, slices: tuple[Slice, ...]) -> tuple[int, int]:
    if not slices:
        return numel, 0
    if max(slice_.end for slice_ in slices) > numel:
        return numel, numel
    runs = [_as_runs(slice_) for slice_ in slices]
    grain = math.gcd(numel, *(n for run in runs for n in (run.offset, *run.strides[:-1], run.shape[-1])))
    counts = torch.zeros(numel // grain, dtype=torch.int32)
    for run in runs:
        shape, strides = (*run.shape[:-1], run.shape[-1] // grain), (*(stride // grain for stride in run.strides[:-1]), 1)
        counts.as_strided(shape, strides, run.offset // grain).add_(1)
    return int((counts == 0).sum()) * grain, int((counts > 1).sum()) * grain


def _as_runs(slice_: Slice) -> Slice:
    """The same elements, each once, ordered by descending stride and ending in the longest contiguous run."""
    pairs = zip(slice_.strides, slice_.shape, strict=True)
    dims = sorted(((stride, size) for stride, size in pairs if size > 1 and stride > 0), reverse=True)
    run = 1
    while dims and dims[-1][0] == run:
        run *= dims.pop()[1]
    return Slice(slice_.offset, (*(size for _, size in dims), run), (*(stride for stride, _ in dims), 1))
