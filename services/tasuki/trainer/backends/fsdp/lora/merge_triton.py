"""Triton kernel that merges adapters into slices of weights and sums what it wrote. Imported only where a GPU can run it."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# Triton compiles these functions; annotations mark constants.

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tasuki.weights.checksum import GROUP
from tasuki.weights.kernels import terms
from tasuki.weights.plan import Slice

_ROWS, _COLUMNS, _SPAN, _NUM_WARPS = 64, 64, 8, 4
"""Rows and columns of a block, blocks of a program, and its warps."""
_LEAST_RANK = 16
"""Limit of tl.dot."""
_WORDS = tl.constexpr(9)
_GROUP = tl.constexpr(GROUP)


@dataclass(frozen=True, slots=True)
class Merge:
    """A slice to write: held = base + scaling * rows @ columns. held, base: [out, in] bfloat16, in a multiple of GROUP. rows: [out, rank].

    first_column: of `in` columns of A, which is given at the launch. where: indices of held's elements in the whole weight, in runs of
    whole groups. slot: of its checksum.
    """

    held: Tensor
    base: Tensor
    rows: Tensor
    first_column: int
    where: Slice
    slot: int

    @property
    def is_possible(self) -> bool:
        """Whether the kernel can write it."""
        is_bfloat16 = self.held.dtype == self.base.dtype == torch.bfloat16
        is_aligned = all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (self.held, self.base, self.rows))
        starts = (self.held.shape[1], self.where.offset, self.where.strides[0])
        return is_bfloat16 and is_aligned and self.where.strides[1] == 1 and all(number % GROUP == 0 for number in starts)

    def words(self) -> list[int]:
        addresses = [each.data_ptr() for each in (self.held, self.base, self.rows)]
        return [*addresses, self.first_column, *self.held.shape, self.where.offset, self.where.strides[0], self.slot]


class MergeTable:
    """Slices merged by one launch. They must keep their memory."""

    def __init__(self, merges: Sequence[Merge]) -> None:
        device = merges[0].held.device
        counts = [triton.cdiv(each.held.shape[0], _ROWS) * triton.cdiv(each.held.shape[1], _COLUMNS * _SPAN) for each in merges]
        tiles = [torch.arange(count) + (index << 32) for index, count in enumerate(counts)]
        self._tiles = torch.cat(tiles).to(device)
        self._weights = torch.tensor([each.words() for each in merges]).to(device)

    def start(self, columns: Tensor, sums: Tensor, *, scaling: float) -> None:
        """Writes every slice and adds its checksum to sums[slot]. columns: A, [rank, all columns] float32. sums: int64."""
        assert columns.stride(1) == 1
        rank = columns.shape[0]
        with torch.cuda.device(sums.device):
            _merge_and_sum_tiles[len(self._tiles),](
                self._weights, self._tiles, columns, sums, rank, columns.stride(0), scaling,
                ROWS=_ROWS, COLUMNS=_COLUMNS, RANK=max(_LEAST_RANK, triton.next_power_of_2(rank)), SPAN=_SPAN, num_warps=_NUM_WARPS,
            )  # fmt: skip


@triton.jit
def _parts(x):
    """Three bfloat16 numbers whose sum is x, up to rounding of float32."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _merge_and_sum_tiles(
    weights, tiles, all_columns, sums, rank, column_stride, scaling, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """SPAN blocks of a slice: summed in float32, rounded once, and read back as copy_and_sum_tiles does. rows, columns: float32."""
    word = tl.load(tiles + tl.program_id(0))
    weight = weights + (word >> 32) * _WORDS
    num_rows, num_columns = tl.load(weight + 4).to(tl.int32), tl.multiple_of(tl.load(weight + 5).to(tl.int32), _GROUP)
    held = tl.multiple_of(tl.load(weight).to(tl.pointer_type(tl.int16)), 16)
    base = tl.multiple_of(tl.load(weight + 1).to(tl.pointer_type(tl.bfloat16)), 16)
    rows = tl.multiple_of(tl.load(weight + 2).to(tl.pointer_type(tl.float32)), 16)
    columns = all_columns + tl.multiple_of(tl.load(weight + 3), _GROUP)
    first_index, index_stride = tl.load(weight + 6), tl.load(weight + 7)
    tile, num_across = word.to(tl.int32), tl.cdiv(num_columns, COLUMNS * SPAN)
    at_rows, at_rank = tile // num_across * ROWS + tl.arange(0, ROWS), tl.arange(0, RANK)
    is_row, is_rank = at_rows < num_rows, at_rank < rank
    b = tl.load(rows + at_rows[:, None] * rank + at_rank[None, :], mask=is_row[:, None] & is_rank[None, :], other=0.0)
    b_high, b_middle, b_low = _parts(b * scaling)
    groups_across: tl.constexpr = COLUMNS // _GROUP
    within = tl.arange(0, _GROUP)[None, :]
    totals = tl.zeros((ROWS * groups_across,), tl.int64)
    # Pipelined, what was written would be read back too early.
    for span in tl.range(0, SPAN, num_stages=1):
        first_column = (tile % num_across * SPAN + span) * COLUMNS
        at_columns = first_column + tl.arange(0, COLUMNS)
        is_column = at_columns < num_columns
        places = at_rows[:, None].to(tl.int64) * num_columns + at_columns[None, :]
        is_there = is_row[:, None] & is_column[None, :]
        before = tl.load(base + places, mask=is_there, other=0.0)
        a = tl.load(
            columns + at_rank[:, None] * column_stride + at_columns[None, :],
            mask=is_rank[:, None] & is_column[None, :],
            other=0.0,
        )
        # Tensor cores multiply parts: as exact as float32.
        a_high, a_middle, a_low = _parts(a)
        product = tl.dot(b_low, a_high)
        product = tl.dot(b_high, a_low, product)
        product = tl.dot(b_middle, a_middle, product)
        product = tl.dot(b_middle, a_high, product)
        product = tl.dot(b_high, a_middle, product)
        product = tl.dot(b_high, a_high, product)
        merged = (before.to(tl.float32) + product).to(tl.bfloat16).to(tl.int16, bitcast=True)
        tl.store(held + places, merged, mask=is_there)
        read = tl.load(held + places, mask=is_there, other=0, volatile=True)
        at_groups = first_column + tl.arange(0, groups_across) * _GROUP
        firsts = first_index + at_rows[:, None].to(tl.int64) * index_stride + at_groups[None, :]
        groups = tl.reshape(read, (ROWS * groups_across, _GROUP))
        totals += terms(groups, tl.reshape(firsts, (ROWS * groups_across,)), within, tl.int16, tl.int16, tl.int16, _GROUP)
    tl.atomic_add(sums + tl.load(weight + 8), tl.sum(totals, axis=0), sem="relaxed")
