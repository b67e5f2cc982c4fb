"""Copies and checksums in host memory, lowered to blocks that csrc processes in one pass with one thread per core."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from tasuki.memory.library import call
from tasuki.weights.plan import Slice
from tasuki.weights.table import Side, Transfer, blocks_of, memory_side

if TYPE_CHECKING:
    from tasuki.weights.copies import ViewCopy

_BLOCK = np.dtype(
    [
        ("source", "<u8"),
        ("held", "<u8"),
        ("rows", "<u8"),
        ("columns", "<u8"),
        ("source_row", "<i8"),
        ("source_column", "<i8"),
        ("held_row", "<i8"),
        ("held_column", "<i8"),
        ("index_row", "<i8"),
        ("index_column", "<i8"),
        ("index", "<u8"),
        ("slot", "<u4"),
        ("item_bytes", "<u4"),
    ]
)
"""csrc's tasuki_block."""


def copy_blocks(copies: Iterable[ViewCopy]) -> np.ndarray:
    """Blocks of summed copies between views of one dtype. They contain addresses, so the caller must keep the views alive."""
    transfers: list[Transfer] = []
    for copy in copies:
        assert copy.where is not None, "a copy that is summed"
        sides = memory_side(copy.source), memory_side(copy.destination)
        transfers.append(Transfer(tuple(copy.destination.shape), *sides, slot=copy.slot, indices=_indices(copy.where)))
    rows: list[tuple[int, ...]] = []
    for block in blocks_of(transfers):
        source, held, indices = block.sides
        rows.append(
            (
                source.start,
                held.start,
                *block.shape,
                *source.strides,
                *held.strides,
                *indices.strides,
                indices.start,
                block.slot,
                held.item_bytes,
            )
        )
    return np.array(rows, dtype=_BLOCK)


def checksum_blocks(views: Iterable[tuple[torch.Tensor, Slice, int]]) -> np.ndarray:
    """Blocks of views, with the indices of their elements and the slots of their sums."""
    transfers = [Transfer(where.shape, memory_side(values), _indices(where), slot=slot) for values, where, slot in views]
    rows: list[tuple[int, ...]] = []
    for block in blocks_of(transfers):
        held, indices = block.sides
        rows.append(
            (0, held.start, *block.shape, 0, 0, *held.strides, *indices.strides, indices.start, block.slot, held.item_bytes)
        )
    return np.array(rows, dtype=_BLOCK)


def copy_and_sum(blocks: np.ndarray, *, num_sums: int) -> np.ndarray:
    """Runs the copies. Returns checksums of the destinations by slot, uint64."""
    sums = np.zeros(num_sums, dtype=np.uint64)
    if len(blocks):
        num_threads = len(os.sched_getaffinity(0))
        call("copy_and_sum", blocks.ctypes.data, len(blocks), sums.ctypes.data, num_sums, num_threads, device="cpu")
    return sums


def _indices(where: Slice) -> Side:
    return Side(where.offset, where.strides, item_bytes=1, alignment=1)
