"""A router of GLM 4.5 or 4.7 Flash computes with the weight of the last sync."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.models.glm4_moe import Glm4MoeGate
from sglang.srt.models.glm4_moe_lite import Glm4MoeLiteGate
from torch.nn.functional import linear

from tasuki.rollout.sglang.live_router import install_live_routers


@pytest.mark.parametrize("kind", [Glm4MoeGate, Glm4MoeLiteGate])
def test_a_router_follows_its_weight(kind: Any) -> None:
    install_live_routers()
    gate = kind(SimpleNamespace(n_routed_experts=5, hidden_size=16)).to(torch.bfloat16)
    hidden_TH = torch.randn(7, 16, dtype=torch.bfloat16)
    for seed in (1, 2):
        gate.weight.data.copy_(torch.randn(5, 16, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(gate(hidden_TH), linear(hidden_TH.float(), gate.weight.float()))
