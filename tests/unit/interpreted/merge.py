"""The kernel that merges adapters against the same sum in float64, run by Triton's interpreter on a CPU."""

from dataclasses import replace

import pytest
import torch

from tasuki.trainer.backends.fsdp.lora.merge_triton import Merge, MergeTable
from tasuki.weights.checksum import MODULUS, checksum
from tasuki.weights.plan import Slice, whole

SHAPES = [(150, 200), (3, 72), (128, 64)]
SCALING = 2.0


@pytest.mark.parametrize("rank", [1, 24])
def test_merged_weights_are_the_sum_and_are_summed(rank: int) -> None:
    torch.manual_seed(0)
    width = sum(columns for _, columns in SHAPES)
    all_columns = 0.1 * torch.randn(rank, width + 50)[:, 8:-42]
    merges: list[Merge] = []
    for slot, shape in enumerate(SHAPES):
        base, rows = (0.02 * torch.randn(shape)).bfloat16(), 0.1 * torch.randn(shape[0], rank)
        first = sum(columns for _, columns in SHAPES[:slot])
        # Rows of a larger weight, from the second one on.
        where = Slice(shape[1], shape, (shape[1], 1))
        merges.append(Merge(torch.full_like(base, torch.nan), base, rows, first, where, 2 * slot))
    assert all(each.is_possible for each in merges)
    sums = torch.zeros(2 * len(SHAPES), dtype=torch.int64)
    MergeTable(merges).start(all_columns, sums, scaling=SCALING)
    in_place = [replace(each, held=base, base=base) for each in merges for base in [each.base.clone()]]
    sums_in_place = torch.zeros_like(sums)
    MergeTable(in_place).start(all_columns, sums_in_place, scaling=SCALING)
    assert torch.equal(sums, sums_in_place)
    assert all(torch.equal(one.held, other.held) for one, other in zip(merges, in_place, strict=True))
    for slot, each in enumerate(merges):
        columns = all_columns[:, each.first_column : each.first_column + each.base.shape[1]]
        exact = each.base.double() + SCALING * each.rows.double() @ columns.double()
        # The interpreter cuts off where a GPU rounds: a whole place of bfloat16.
        assert ((each.held.double() - exact).abs() <= exact.abs() * 2**-7 + 1e-6).all()
        assert int(sums[2 * slot]) % MODULUS == checksum(each.held, each.where)


def test_slices_that_the_kernel_cannot_write_are_known() -> None:
    base, rows = torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(4, 2)

    def is_possible(held: torch.Tensor = base, of: torch.Tensor = base, where: Slice | None = None) -> bool:
        return Merge(held, of, rows, 0, where or whole(tuple(held.shape)), 0).is_possible

    assert is_possible()
    odd = torch.zeros(4, 12, dtype=torch.bfloat16)
    assert not is_possible(odd, odd)
    assert not is_possible(of=base.float())
    assert not is_possible(torch.zeros(65, dtype=torch.bfloat16)[1:].view(4, 16))
    assert not is_possible(where=Slice(4, (4, 16), (16, 1)))
