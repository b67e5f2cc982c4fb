"""Adapters merged into bfloat16 weights on a GPU, beside the same sum in float64. Needs a CUDA GPU and no network."""

from __future__ import annotations

import pytest
import torch

from tasuki.trainer.backends.fsdp.merged_weights import _Factors, merge

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("rank", [4, 32])
def test_merged_weights_are_rounded_once(rank: int) -> None:
    torch.manual_seed(0)
    base = (0.02 * torch.randn(1536, 2048, device="cuda")).bfloat16()
    rows, columns = 0.1 * torch.randn(1536, rank, device="cuda"), 0.1 * torch.randn(rank, 4096, device="cuda")[:, 1024:3072]
    held = base.clone()
    merge(held, base, _Factors.of(rows, columns), scaling=2.0)
    exact = base.double() + 2.0 * rows.double() @ columns.double()
    # Half a place of bfloat16, and what the low halves leave out.
    assert ((held.double() - exact).abs() <= exact.abs() * 2**-8 * 1.01 + 5e-5).all()
    assert (held == exact.bfloat16()).float().mean() > 0.99
