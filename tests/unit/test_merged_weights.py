"""Merging adapters into slices of weights: the groups that are gathered at once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasuki.trainer.backends.fsdp.lora import merged_weights
from tasuki.trainer.backends.fsdp.lora.merged_weights import _grouped


def test_weights_of_one_rank_are_gathered_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def weight(rank: int, width: int, scaling: float = 1.0) -> Any:
        return SimpleNamespace(a=torch.empty(rank, width), scaling=scaling)

    monkeypatch.setattr(merged_weights, "_GROUP_BYTES", 4 * 8 * 100)
    weights = [weight(8, 60), weight(8, 40), weight(8, 1), weight(8, 300), weight(4, 2), weight(4, 3), weight(4, 1, 2.0)]
    assert [[each.a.shape[1] for each in group] for group in _grouped(weights)] == [[60, 40], [1], [300], [2, 3], [1]]
