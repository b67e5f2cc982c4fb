"""Boxes of a tensor's elements, such as rows or columns: their overlaps and gaps. Pure arithmetic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True, slots=True)
class Box:
    """The elements whose index in each dimension lies in [offset, offset + size)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def intersection(self, other: "Box") -> "Box | None":
        """The common elements; None if there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(end - start for start, end in zip(starts, map(min, self.ends, other.ends), strict=True))
        return Box(starts, sizes) if min(sizes) > 0 else None

    def halves(self, dim: int, at: int) -> "tuple[Box, Box]":
        """The elements before index `at` of `dim`, and the rest."""
        first = at - self.offsets[dim]
        return self._with(dim, self.offsets[dim], first), self._with(dim, at, self.sizes[dim] - first)

    def _with(self, dim: int, offset: int, size: int) -> "Box":
        offsets = (*self.offsets[:dim], offset, *self.offsets[dim + 1 :])
        return Box(offsets, (*self.sizes[:dim], size, *self.sizes[dim + 1 :]))

    def __str__(self) -> str:
        """Formats as a Python slice: [0:4, 6:8]."""
        return f"[{', '.join(f'{start}:{end}' for start, end in zip(self.offsets, self.ends, strict=True))}]"


def first_overlap(boxes: Sequence[Box]) -> Box | None:
    """Elements that two of the boxes share; None if there are none."""
    num_dims = len(boxes[0].sizes)
    # Comparing along the dimension that separates most boxes leaves few pairs.
    dim = max(range(num_dims), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    ordered = sorted(boxes, key=lambda box: box.offsets[dim])
    for index, box in enumerate(ordered):
        end = box.ends[dim]
        for other in takewhile(lambda other, end=end: other.offsets[dim] < end, ordered[index + 1 :]):
            shared = box.intersection(other)
            if shared is not None:
                return shared
    return None


def first_gap(boxes: Sequence[Box], shape: tuple[int, ...]) -> Box | None:
    """Elements of a tensor of `shape` that no box covers; None if all are covered. Boxes must be inside and disjoint.

    The number of elements shows which half of a region has a gap, so the search never branches.
    """
    region = Box((0,) * len(shape), shape)
    held = list(boxes)
    if _numel(held) == region.numel:
        return None
    while held:
        dim, at = _face(held[0], region)
        for half in region.halves(dim, at):
            inside = [shared for box in held if (shared := box.intersection(half)) is not None]
            if _numel(inside) < half.numel:
                region, held = half, inside
                break
    return region


def _numel(boxes: Sequence[Box]) -> int:
    return sum(box.numel for box in boxes)


def _face(box: Box, region: Box) -> tuple[int, int]:
    """Dimension and index of a face of `box` that cuts `region`, which it covers partly."""
    return next(
        (dim, at)
        for dim in range(len(region.sizes))
        for at in (box.offsets[dim], box.ends[dim])
        if region.offsets[dim] < at < region.ends[dim]
    )
