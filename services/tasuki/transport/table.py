"""Copies and checksums lowered to a table that a GPU kernel walks: blocks of rows and columns, cut into tiles. Pure arithmetic."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

BLOCK_WORDS = 10
"""64-bit words of a block: start of both sides, units, columns, row stride of both, column stride of both, slot, index."""
TILE_UNITS = 2048
"""Units that one program of the kernel handles."""
VECTOR_BYTES = 16
_MAX_BLOCK_ELEMENTS = 1 << 30


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a transfer. start: address, or index for the indices of a checksum; strides: in elements.

    item_bytes: what `start` grows by from element to element; 1 for indices.
    alignment: what `start` must be a multiple of for a vector access, in the units of `start`.
    """

    start: int
    strides: tuple[int, ...]
    item_bytes: int
    alignment: int

    def shifted(self, dim: int, index: int) -> Side:
        return Side(self.start + index * self.strides[dim] * self.item_bytes, self.strides, self.item_bytes, self.alignment)

    def without(self, dim: int) -> Side:
        return Side(self.start, self.strides[:dim] + self.strides[dim + 1 :], self.item_bytes, self.alignment)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Elements of one shape that lie differently on two sides.

    slot: for checksums the sum that they add to. lane: tiles of different lanes are interleaved, such as those of several owners.
    index: for copies that are summed the index of the first element; the first side's strides are then those of the indices, too.
    """

    shape: tuple[int, ...]
    first: Side
    second: Side
    slot: int = 0
    lane: int = 0
    index: int = 0

    def part(self, shape: tuple[int, ...], first: Side, second: Side, *, skipped: int = 0) -> Transfer:
        """A part of this transfer whose first element comes `skipped` elements later on the first side."""
        return Transfer(shape, first, second, self.slot, self.lane, self.index + skipped)


@dataclass(frozen=True, slots=True)
class Table:
    """The work of one launch. A unit is `vector` elements, contiguous on both sides; strides in `blocks` count units.

    blocks: [num_blocks, BLOCK_WORDS] int64. tiles: [num_tiles] int64, each a block's number << 32 | its first unit.
    """

    vector: int
    blocks: torch.Tensor
    tiles: torch.Tensor


def memory_side(tensor: torch.Tensor) -> Side:
    return Side(tensor.data_ptr(), tensor.stride(), tensor.element_size(), VECTOR_BYTES)


def build_tables(transfers: Sequence[Transfer], *, vector: int, first_lane: int = 0) -> list[Table]:
    """At most two tables: what can be accessed by vectors of `vector` elements, and the rest, element by element.

    first_lane: which lane has the first tile; ranks that read from the same owners pass different ones.
    """
    blocks: defaultdict[int, list[tuple[list[int], int]]] = defaultdict(list)
    for transfer in transfers:
        for block in _blocks(_collapsed(transfer)):
            width = vector if _is_vectorizable(block, vector) else 1
            blocks[width].append((_words(block, width), block.lane))
    return [_table(width, rows, first_lane) for width, rows in sorted(blocks.items(), reverse=True)]


def _collapsed(transfer: Transfer) -> Transfer:
    """The same elements with as few dimensions as both sides allow, the second side's largest strides first."""
    sides = zip(transfer.shape, transfer.first.strides, transfer.second.strides, strict=True)
    dims = sorted((dim for dim in sides if dim[0] != 1), key=lambda dim: (dim[2], dim[1]), reverse=True)
    merged: list[tuple[int, int, int]] = []
    for size, first, second in dims:
        if merged and merged[-1][1:] == (first * size, second * size):
            merged[-1] = (merged[-1][0] * size, first, second)
        else:
            merged.append((size, first, second))
    shape = tuple(size for size, _, _ in merged)
    first, second = transfer.first, transfer.second
    return transfer.part(
        shape,
        Side(first.start, tuple(stride for _, stride, _ in merged), first.item_bytes, first.alignment),
        Side(second.start, tuple(stride for _, _, stride in merged), second.item_bytes, second.alignment),
    )


def _blocks(transfer: Transfer) -> Iterator[Transfer]:
    """Parts of two dimensions, small enough that their units are counted in 31 bits."""
    shape, first, second = transfer.shape, transfer.first, transfer.second
    if math.prod(shape) == 0:
        return
    if len(shape) > 2:
        for index in range(shape[0]):
            sides = first.shifted(0, index).without(0), second.shifted(0, index).without(0)
            yield from _blocks(transfer.part(shape[1:], *sides, skipped=index * first.strides[0]))
    elif math.prod(shape) > _MAX_BLOCK_ELEMENTS:
        dim = max(range(len(shape)), key=lambda dim: shape[dim])
        half = -(-shape[dim] // 2 // 64) * 64
        for start, size in ((0, half), (half, shape[dim] - half)):
            sides = first.shifted(dim, start), second.shifted(dim, start)
            part = (*shape[:dim], size, *shape[dim + 1 :])
            yield from _blocks(transfer.part(part, *sides, skipped=start * first.strides[dim]))
    else:
        missing = 2 - len(shape)
        padded = [
            Side(side.start, (*[0] * missing, *side.strides), side.item_bytes, side.alignment) for side in (first, second)
        ]
        yield transfer.part((*[1] * missing, *shape), *padded)


def _is_vectorizable(block: Transfer, vector: int) -> bool:
    rows, cols = block.shape
    return block.index % vector == 0 and all(
        side.strides[1] == 1
        and cols % vector == 0
        and side.start % side.alignment == 0
        and (rows == 1 or (side.strides[0] % vector == 0 and side.strides[0] * side.item_bytes % side.alignment == 0))
        for side in (block.first, block.second)
    )


def _words(block: Transfer, width: int) -> list[int]:
    (rows, cols), (first_row, first_col), (second_row, second_col) = block.shape, block.first.strides, block.second.strides
    units, cols = rows * cols // width, cols // width
    if width > 1:
        first_row, second_row, first_col, second_col = first_row // width, second_row // width, 1, 1
    strides = [first_row, second_row, first_col, second_col]
    return [block.first.start, block.second.start, units, cols, *strides, block.slot, block.index]


def _table(width: int, rows: Sequence[tuple[list[int], int]], first_lane: int) -> Table:
    blocks = torch.tensor([words for words, _ in rows], dtype=torch.int64)
    num_tiles = (blocks[:, 2] + TILE_UNITS - 1) // TILE_UNITS
    block_of_tile = torch.repeat_interleave(torch.arange(len(rows)), num_tiles)
    before = torch.cumsum(num_tiles, 0) - num_tiles
    tile_in_block = torch.arange(len(block_of_tile)) - before[block_of_tile]
    tiles = block_of_tile << 32 | tile_in_block * TILE_UNITS
    lanes = torch.tensor([lane for _, lane in rows])[block_of_tile]
    return Table(width, blocks, tiles[_interleaved(lanes, first_lane)])


def _interleaved(lanes: torch.Tensor, first_lane: int) -> torch.Tensor:
    """An order in which every lane progresses at the pace that lets all end together, `first_lane` in front."""
    places = torch.empty(len(lanes), dtype=torch.float64)
    num_lanes = int(lanes.max()) + 1
    for lane in lanes.unique().tolist():
        of_lane = lanes == lane
        count = int(of_lane.sum())
        turn = (lane - first_lane) % num_lanes / num_lanes
        places[of_lane] = (torch.arange(count, dtype=torch.float64) + turn) / count
    return torch.argsort(places, stable=True)
