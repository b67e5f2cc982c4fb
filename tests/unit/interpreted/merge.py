"""The kernel that merges adapters against the same sum in float64, run by Triton's interpreter on a CPU."""

from __future__ import annotations

import pytest
import torch

from tasuki.trainer.backends.fsdp.merge_triton import merge_on_gpu


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter needs no device."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # raised by the interpreter's numpy
@pytest.mark.parametrize("rank", [1, 24])
def test_merged_weights_are_the_sum(rank: int) -> None:
    torch.manual_seed(0)
    base = (0.02 * torch.randn(150, 200)).bfloat16()
    rows, columns = 0.1 * torch.randn(150, rank), 0.1 * torch.randn(rank, 300)[:, 50:250]
    merged = torch.full_like(base, torch.nan)
    merge_on_gpu(merged, base, rows, columns, scaling=2.0)
    exact = base.double() + 2.0 * rows.double() @ columns.double()
    # The interpreter cuts off where a GPU rounds: a whole place of bfloat16.
    assert ((merged.double() - exact).abs() <= exact.abs() * 2**-7 + 1e-6).all()
