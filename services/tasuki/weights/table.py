"""Copies and checksums lowered to a table for a GPU kernel: blocks of rows and columns, split into tiles. Pure arithmetic."""

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tasuki.weights.checksum import GROUP

BLOCK_WORDS = 10
"""64-bit words of a block: start of both sides, units, columns, row stride of both, column stride of both, slot, index."""
INDEXED_BLOCK_WORDS = 12
"""The same plus row and column stride of the indices, if they differ from the first side's."""
TILE_UNITS = 2048
"""Units processed by one program of the kernel."""
VECTOR_BYTES = 16
_MAX_BLOCK_ELEMENTS = 1 << 30


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a transfer. start: address, or index for a checksum's indices. strides: in elements.

    item_bytes: increment of `start` per element; 1 for indices.
    alignment: required of `start` for a vector access, in units of `start`.
    """

    start: int
    strides: tuple[int, ...]
    item_bytes: int
    alignment: int

    def shifted(self, dim: int, index: int) -> "Side":
        return replace(self, start=self.start + index * self.strides[dim] * self.item_bytes)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Elements of one shape with different layouts on two sides.

    slot: for checksums, the sum to add to. lane: tiles of different lanes, such as owners, are interleaved.
    indices: a third side, for summed copies.
    """

    shape: tuple[int, ...]
    first: Side
    second: Side
    slot: int = 0
    lane: int = 0
    indices: Side | None = None

    @property
    def sides(self) -> tuple[Side, ...]:
        return (self.first, self.second) if self.indices is None else (self.first, self.second, self.indices)

    def part(self, shape: tuple[int, ...], sides: Iterable[Side]) -> "Transfer":
        """A part of this transfer, with another shape or other dimensions."""
        first, second, *indices = sides
        return replace(self, shape=shape, first=first, second=second, indices=indices[0] if indices else None)


@dataclass(frozen=True, slots=True)
class Table:
    """The work of one launch. A unit is `vector` elements, contiguous on both sides; strides in `blocks` are in units.

    blocks: [num_blocks, BLOCK_WORDS or INDEXED_BLOCK_WORDS] int64. tiles: [num_tiles] int64: block number << 32 | first unit.
    """

    vector: int
    blocks: torch.Tensor
    tiles: torch.Tensor


def memory_side(tensor: torch.Tensor) -> Side:
    return Side(tensor.data_ptr(), tensor.stride(), tensor.element_size(), VECTOR_BYTES)


def build_tables(transfers: Sequence[Transfer], *, first_lane: int = 0) -> list[Table]:
    """Builds a table per kind of access and size of block: vectors of GROUP elements where possible, else single elements.

    first_lane: lane of the first tile; ranks that read from the same owners pass different ones.
    """
    blocks: defaultdict[tuple[int, int], list[tuple[list[int], int]]] = defaultdict(list)
    for transfer in transfers:
        first, second = transfer.first.start, transfer.second.start
        places = first % transfer.first.alignment, second % transfer.second.alignment
        # The same elements with other starts, for no slot and lane: equal for the same tensor of every layer.
        sides = replace(transfer.first, start=places[0]), replace(transfer.second, start=places[1])
        for width, words in _lowered(Transfer(transfer.shape, *sides, indices=transfer.indices)):
            moved = [words[0] + first - places[0], words[1] + second - places[1], *words[2:8], transfer.slot, *words[9:]]
            blocks[width, len(words)].append((moved, transfer.lane))
    return [_table(width, rows, first_lane) for (width, _), rows in sorted(blocks.items(), reverse=True)]


@functools.lru_cache(maxsize=1 << 12)
def _lowered(transfer: Transfer) -> tuple[tuple[int, list[int]], ...]:
    """Width and words of each block."""
    blocks = [(block, GROUP if _is_vectorizable(block) else 1) for block in blocks_of([transfer])]
    return tuple((width, _words(block, width)) for block, width in blocks)


def blocks_of(transfers: Iterable[Transfer]) -> Iterator[Transfer]:
    """Splits transfers into two-dimensional parts."""
    for transfer in transfers:
        yield from _blocks(_collapsed(transfer))


def _collapsed(transfer: Transfer) -> Transfer:
    """The same elements with as few dimensions as all sides allow, ordered by descending stride of the second side."""
    sides = zip(transfer.shape, *(side.strides for side in transfer.sides), strict=True)
    dims = sorted((dim for dim in sides if dim[0] != 1), key=lambda dim: (dim[2], dim[1]), reverse=True)
    merged: list[tuple[int, ...]] = []
    for size, *strides in dims:
        if merged and merged[-1][1:] == tuple(stride * size for stride in strides):
            merged[-1] = (merged[-1][0] * size, *strides)
        else:
            merged.append((size, *strides))
    return transfer.part(
        tuple(dim[0] for dim in merged),
        [replace(side, strides=tuple(dim[1 + place] for dim in merged)) for place, side in enumerate(transfer.sides)],
    )


def _blocks(transfer: Transfer) -> Iterator[Transfer]:
    """Two-dimensional parts, small enough to count their units in 31 bits."""
    shape, sides = transfer.shape, transfer.sides
    if math.prod(shape) == 0:
        return
    if len(shape) > 2:
        for index in range(shape[0]):
            inner = [replace(side.shifted(0, index), strides=side.strides[1:]) for side in sides]
            yield from _blocks(transfer.part(shape[1:], inner))
    elif math.prod(shape) > _MAX_BLOCK_ELEMENTS:
        dim = max(range(len(shape)), key=lambda dim: shape[dim])
        half = -(-shape[dim] // 2 // 64) * 64
        for start, size in ((0, half), (half, shape[dim] - half)):
            part = (*shape[:dim], size, *shape[dim + 1 :])
            yield from _blocks(transfer.part(part, [side.shifted(dim, start) for side in sides]))
    else:
        missing = 2 - len(shape)
        padded = [replace(side, strides=(*[0] * missing, *side.strides)) for side in sides]
        yield transfer.part((*[1] * missing, *shape), padded)


def _is_vectorizable(block: Transfer) -> bool:
    rows, cols = block.shape
    return all(
        side.strides[1] == 1
        and cols % GROUP == 0
        and side.start % side.alignment == 0
        and (rows == 1 or (side.strides[0] % GROUP == 0 and side.strides[0] * side.item_bytes % side.alignment == 0))
        for side in block.sides
    )


def _words(block: Transfer, width: int) -> list[int]:
    rows, cols = block.shape
    # Row and column stride of each side; those of dimensions of size 1 are irrelevant.
    steps = [
        (side.strides[0] // width if rows > 1 else 0, (1 if width > 1 else side.strides[1]) if cols > 1 else 0)
        for side in block.sides
    ]
    (first_row, first_col), (second_row, second_col) = steps[:2]
    strides = [first_row, second_row, first_col, second_col]
    index = 0 if block.indices is None else block.indices.start
    words = [block.first.start, block.second.start, rows * cols // width, cols // width, *strides, block.slot, index]
    return words if block.indices is None or steps[2] == steps[0] else [*words, *steps[2]]


def _table(width: int, rows: Sequence[tuple[list[int], int]], first_lane: int) -> Table:
    blocks, lanes = np.array([words for words, _ in rows], dtype=np.int64), np.array([lane for _, lane in rows])
    by_lane = np.argsort(lanes, kind="stable")
    num_tiles = -(-blocks[by_lane, 2] // TILE_UNITS)
    ends = np.cumsum(num_tiles)
    # Of the tile before all others, if it were the block's.
    origins = (by_lane << 32) - (ends - num_tiles) * TILE_UNITS
    tiles = np.repeat(origins, num_tiles) + np.arange(ends[-1]) * TILE_UNITS
    counts = np.bincount(lanes[by_lane], weights=num_tiles).astype(np.int64)
    ordered = tiles[_interleaved(counts, first_lane)]
    return Table(width, torch.from_numpy(blocks), torch.from_numpy(ordered))


def _interleaved(counts: np.ndarray, first_lane: int) -> np.ndarray:
    """An order of tiles, which are sorted by lane, in which all lanes end together. Starts with `first_lane`.

    counts: tiles of each lane.
    """
    turns = (np.arange(len(counts)) - first_lane) % len(counts) / len(counts)
    places = [(np.arange(count) + turn) / count for count, turn in zip(counts.tolist(), turns.tolist(), strict=True) if count]
    # Timsort merges the lanes, each of which is sorted.
    return np.argsort(np.concatenate(places), kind="stable")
