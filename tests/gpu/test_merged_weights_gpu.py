"""Adapters merged into bfloat16 weights on a GPU, beside the same sum in float64. Needs a CUDA GPU and no network."""

import pytest
import torch
from torch import Tensor

from tasuki.trainer.backends.fsdp.lora.merge_triton import Merge, MergeTable
from tasuki.trainer.backends.fsdp.lora.merged_weights import merge
from tasuki.trainer.modules.lora import merge_experts
from tasuki.weights.checksum import MODULUS, checksum
from tasuki.weights.plan import Slice, whole

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


@pytest.mark.parametrize("columns", [2048, 75])
def test_a_weight_merged_in_place_is_the_merged_copy(columns: int) -> None:
    """By the kernel and, where it is not possible, by torch; alone, and with DoRA's magnitudes."""
    torch.manual_seed(0)
    base = (0.02 * torch.randn(1536, columns, device="cuda")).bfloat16()
    factors = 0.1 * torch.randn(1536, 32, device="cuda"), 0.1 * torch.randn(32, columns, device="cuda")
    for magnitude in (None, torch.rand(1536, device="cuda")):
        held, copy = base.clone(), torch.empty_like(base)
        for each, of in ((copy, base), (held, held)):
            merge(each, base=of, factors=factors, scaling=SCALING, magnitude=magnitude)
        assert torch.equal(held, copy) and not torch.equal(held, base)


def test_weights_and_experts_merged_in_place_by_one_launch_are_the_merged_copies() -> None:
    torch.manual_seed(0)
    base = (0.02 * torch.randn(12, 1024, 2048, device="cuda")).bfloat16()
    a, b = (0.1 * torch.randn(12, *shape, device="cuda") for shape in ((16, 2048), (1024, 16)))
    tables, held, copy = list[Tensor](), base.clone(), torch.empty_like(base)
    for target, of in ((copy, base), (held, held)):
        merges = [Merge(target[i], of[i], b[i], 2048 * i, whole((1024, 2048)), i) for i in range(12)]
        sums = torch.zeros(12, dtype=torch.int64, device="cuda")
        MergeTable(merges).start(torch.cat(list(a), dim=1), sums, scaling=SCALING)
        tables.append(sums)
    assert torch.equal(held, copy) and torch.equal(*tables)
    held = base.clone()
    for target, of in ((copy, base), (held, held)):
        rows = [part for expert in target for part in expert.split(512)]  # gate and up
        merge_experts(rows, of, a, b, scaling=SCALING)
    assert torch.equal(held, copy) and not torch.equal(held, base)
