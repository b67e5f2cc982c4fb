"""Adapters merged into bfloat16 weights on a GPU, beside the same sum in float64. Needs a CUDA GPU and no network."""

import pytest
import torch

from tasuki.trainer.backends.fsdp.lora.merge_triton import Merge, MergeTable
from tasuki.trainer.backends.fsdp.lora.merged_weights import merge
from tasuki.weights.checksum import MODULUS, checksum
from tasuki.weights.plan import Slice

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SCALING = 2.0


def exact_of(base: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return base.double() + SCALING * rows.double() @ columns.double()


def check(held: torch.Tensor, exact: torch.Tensor) -> None:
    # Half a place of bfloat16, and what the low halves leave out.
    assert ((held.double() - exact).abs() <= exact.abs() * 2**-8 * 1.01 + 1e-6).all()
    assert (held == exact.bfloat16()).float().mean() > 0.998


@pytest.mark.parametrize("rank", [1, 8, 32, 96])
@pytest.mark.parametrize("shape", [(1536, 2048), (77, 1000), (50, 75)])
def test_merged_weights_are_rounded_once(shape: tuple[int, int], rank: int) -> None:
    torch.manual_seed(0)
    num_rows, num_columns = shape
    base = (0.02 * torch.randn(shape, device="cuda")).bfloat16()
    columns = 0.1 * torch.randn(rank, 2 * num_columns, device="cuda")[:, num_columns // 2 :][:, :num_columns]
    rows, held = 0.1 * torch.randn(num_rows, rank, device="cuda"), torch.full_like(base, torch.nan)
    merge(held, base=base, factors=(rows, columns), scaling=SCALING)
    check(held, exact_of(base, rows, columns))


def test_one_launch_merges_and_sums_many_weights() -> None:
    torch.manual_seed(0)
    shapes = [(1000, 512), (3, 72), (640, 4096), (128, 64)]
    all_columns = 0.1 * torch.randn(32, sum(columns for _, columns in shapes), device="cuda")
    merges: list[Merge] = []
    for slot, shape in enumerate(shapes):
        base = (0.02 * torch.randn(shape, device="cuda")).bfloat16()
        rows = 0.1 * torch.randn(shape[0], 32, device="cuda")
        first, where = sum(columns for _, columns in shapes[:slot]), Slice(7 * shape[1], shape, (shape[1], 1))
        merges.append(Merge(torch.full_like(base, torch.nan), base, rows, first, where, slot))
    sums = torch.zeros(len(shapes), dtype=torch.int64, device="cuda")
    MergeTable(merges).start(all_columns, sums, scaling=SCALING)
    for each, total in zip(merges, sums.tolist(), strict=True):
        check(each.held, exact_of(each.base, each.rows, all_columns[:, each.first_column :][:, : each.base.shape[1]]))
        assert total % MODULUS == checksum(each.held, each.where)
