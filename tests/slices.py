"""Ways to shard a tensor among trainer ranks: by rows, columns, both, or boxes; the last ranks may hold less, or nothing."""

from collections.abc import Callable

import torch

from tasuki.weights.manifest import Box
from tasuki.weights.plan import Slice

Cut = Callable[[tuple[int, ...], int, int], Box]
"""Maps (shape, rank, number of ranks) to the rank's box."""


def by_rows(shape: tuple[int, ...], rank: int, num_ranks: int) -> Box:
    """Splits dim 0 into chunks of equal size, as FSDP2 does."""
    return _chunk(Box((0,) * len(shape), shape), 0, rank, num_ranks)


def by_columns(shape: tuple[int, ...], rank: int, num_ranks: int) -> Box:
    """Splits the last dimension into chunks of equal size."""
    return _chunk(Box((0,) * len(shape), shape), len(shape) - 1, rank, num_ranks)


def by_rows_and_columns(shape: tuple[int, ...], rank: int, num_ranks: int) -> Box:
    """Gives the first rows to rank 0 and splits the rest by columns among the other ranks."""
    upper, lower = Box((0,) * len(shape), shape).halves(0, -(-shape[0] // num_ranks))
    return upper if rank == 0 else _chunk(lower, len(shape) - 1, rank - 1, num_ranks - 1)


def by_boxes(shape: tuple[int, ...], rank: int, num_ranks: int) -> Box:
    """Splits the tensor into two columns of boxes."""
    assert num_ranks % 2 == 0
    if len(shape) == 1:
        return by_rows(shape, rank, num_ranks)
    return _chunk(_chunk(Box((0,) * len(shape), shape), 0, rank // 2, num_ranks // 2), len(shape) - 1, rank % 2, 2)


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(map(slice, box.offsets, box.ends))]


def strided(tensor: torch.Tensor, at: Slice) -> torch.Tensor:
    return tensor.as_strided(at.shape, at.strides, at.offset)


def _chunk(box: Box, dim: int, index: int, num_chunks: int) -> Box:
    """Returns one chunk as torch.chunk would; empty past the last chunk."""
    size = -(-box.sizes[dim] // num_chunks)
    start = min(box.sizes[dim], index * size)
    length = min(size, box.sizes[dim] - start)
    offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
    return Box(offsets, (*box.sizes[:dim], length, *box.sizes[dim + 1 :]))
