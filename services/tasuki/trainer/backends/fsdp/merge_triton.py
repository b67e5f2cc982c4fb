"""Triton kernel that merges an adapter into a slice of a weight. Imported only where a GPU can run it."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# Triton compiles these functions; annotations mark constants.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS, _NUM_WARPS = 128, 128, 8
_LEAST_RANK = 16
"""Limit of tl.dot."""


@triton.jit
def _merge_tiles(
    merged, base, rows, columns, num_rows, num_columns, rank, column_stride, scaling,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """merged = base + scaling * rows @ columns, summed in float32 and rounded once. rows, columns: float32."""
    at_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at_columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at_rank = tl.arange(0, RANK)
    is_row, is_column, is_rank = at_rows < num_rows, at_columns < num_columns, at_rank < rank
    b = tl.load(rows + at_rows[:, None] * rank + at_rank[None, :], mask=is_row[:, None] & is_rank[None, :], other=0.0)
    a = tl.load(
        columns + at_rank[:, None] * column_stride + at_columns[None, :], mask=is_rank[:, None] & is_column[None, :], other=0.0
    )
    product = tl.dot(b, a, input_precision="tf32x3")  # on tensor cores, nearly as exact as float32
    places = at_rows[:, None].to(tl.int64) * num_columns + at_columns[None, :]
    is_there = is_row[:, None] & is_column[None, :]
    held = tl.load(base + places, mask=is_there, other=0.0).to(tl.float32)
    tl.store(merged + places, (held + scaling * product).to(tl.bfloat16), mask=is_there)


def merge_on_gpu(merged: Tensor, base: Tensor, rows: Tensor, columns: Tensor, *, scaling: float) -> None:
    """Writes base + scaling * rows @ columns. merged, base: [out, in] bfloat16. rows: [out, rank], columns: [rank, in] float32.

    Reads and writes each number once.
    """
    assert merged.is_contiguous() and base.is_contiguous() and rows.is_contiguous() and columns.stride(1) == 1
    (num_rows, num_columns), rank = merged.shape, rows.shape[1]
    grid = triton.cdiv(num_rows, _ROWS), triton.cdiv(num_columns, _COLUMNS)
    with torch.cuda.device(merged.device):
        _merge_tiles[grid](
            merged, base, rows, columns, num_rows, num_columns, rank, columns.stride(0), scaling,
            ROWS=_ROWS, COLUMNS=_COLUMNS, RANK=max(_LEAST_RANK, triton.next_power_of_2(rank)), num_warps=_NUM_WARPS,
        )  # fmt: skip
