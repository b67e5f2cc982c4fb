"""Attention with its rotation fused, against transformers' own, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tasuki.trainer.backends.fsdp.rotary import RotaryAttention, fuse_rotation
from tests.models import CONFIGS, make_model
from tests.unit.test_packed_attention import LENGTHS, pack, policy_of

FUSED = {"llama", "llama_tied", "qwen2", "qwen2_tied", "qwen3", "qwen3_moe", "mistral", "mixtral"}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_fused_model_computes_what_transformers_computes(kind: str) -> None:
    causal_lm, batch = make_model(kind, seed=5), pack(LENGTHS)
    plain, fused = policy_of(causal_lm), policy_of(causal_lm)
    names = [name for name, _ in fused.named_parameters()]
    fuse_rotation(fused.causal_lm)
    num_fused = sum(isinstance(module, RotaryAttention) for module in fused.modules())
    assert num_fused == (2 if kind in FUSED else 0)
    assert [name for name, _ in fused.named_parameters()] == names
    for policy in (plain, fused):
        policy(batch)[0].square().sum().backward()
    torch.testing.assert_close(fused(batch)[0], plain(batch)[0], rtol=1e-5, atol=1e-5)
    exact: dict[str, Any] = dict(plain.named_parameters())
    for name, param in fused.named_parameters():
        assert param.grad is not None
        assert (param.grad - exact[name].grad).norm() <= 1e-5 * max(1.0, exact[name].grad.norm()), name
