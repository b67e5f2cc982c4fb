"""Merging adapters into slices of weights: the groups that are gathered at once, and the product on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasuki.trainer.backends.fsdp import merged_weights
from tasuki.trainer.backends.fsdp.merged_weights import _column_halves, _grouped, _row_halves


def test_two_halves_of_each_factor_give_the_product_of_float32() -> None:
    torch.manual_seed(0)
    rows, columns = torch.randn(64, 32), torch.randn(32, 48)
    exact = rows.double() @ columns.double()
    halves = _row_halves(rows).double() @ _column_halves(columns).double()
    rounded = rows.bfloat16().double() @ columns.bfloat16().double()
    assert (halves - exact).abs().max() < 2**-12 < (rounded - exact).abs().max()


def test_weights_of_one_rank_are_gathered_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def weight(rank: int, width: int) -> Any:
        return SimpleNamespace(a=torch.empty(rank, width))

    monkeypatch.setattr(merged_weights, "_GROUP_BYTES", 4 * 8 * 100)
    weights = [weight(8, 60), weight(8, 40), weight(8, 1), weight(8, 300), weight(4, 2), weight(4, 3)]
    assert [[each.a.shape[1] for each in group] for group in _grouped(weights)] == [[60, 40], [1], [300], [2, 3]]
