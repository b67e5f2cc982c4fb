"""Adapters merged into bfloat16 weights on a GPU, beside the same sum in float64. Needs a CUDA GPU and no network."""

from __future__ import annotations

import pytest
import torch

from tasuki.trainer.backends.fsdp.merged_weights import merge

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("rank", [1, 8, 32, 96])
@pytest.mark.parametrize("shape", [(1536, 2048), (77, 1000)])
def test_merged_weights_are_rounded_once(shape: tuple[int, int], rank: int) -> None:
    torch.manual_seed(0)
    num_rows, num_columns = shape
    base = (0.02 * torch.randn(shape, device="cuda")).bfloat16()
    columns = 0.1 * torch.randn(rank, 2 * num_columns, device="cuda")[:, num_columns // 2 :][:, :num_columns]
    rows, held = 0.1 * torch.randn(num_rows, rank, device="cuda"), torch.full_like(base, torch.nan)
    merge(held, base=base, factors=(rows, columns), scaling=2.0)
    exact = base.double() + 2.0 * rows.double() @ columns.double()
    # Half a place of bfloat16, and what the low halves leave out.
    assert ((held.double() - exact).abs() <= exact.abs() * 2**-8 * 1.01 + 1e-6).all()
    assert (held == exact.bfloat16()).float().mean() > 0.99
