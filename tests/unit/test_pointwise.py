"""Fused norms and MLPs against those of transformers, for every family."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tasuki.trainer.modules.pointwise import GatedMlp, RmsNorm, fuse_pointwise
from tests.models import CONFIGS, make_model

NORMS = {"gemma2": 0, "gemma3": 0}
"""Number of fused norms in families whose norms are left as they are; others have at least two per layer and one at the end."""
MLPS = {"mixtral": 0, "qwen3_moe": 0}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_fused_model_computes_what_transformers_computes(kind: str) -> None:
    model: Any = make_model(kind, seed=0)
    fused: Any = copy.deepcopy(model)
    fuse_pointwise(fused)
    counts = {each: sum(isinstance(module, each) for module in fused.modules()) for each in (RmsNorm, GatedMlp)}
    assert counts[RmsNorm] == NORMS[kind] if kind in NORMS else counts[RmsNorm] >= 5
    assert counts[GatedMlp] == MLPS.get(kind, 2)
    assert [name for name, _ in fused.named_parameters()] == [name for name, _ in model.named_parameters()]
    token_ids = torch.randint(3, 60, (2, 17), generator=torch.Generator().manual_seed(0))
    for each in (model, fused):
        each(input_ids=token_ids).logits.square().mean().backward()
    torch.testing.assert_close(fused(input_ids=token_ids).logits, model(input_ids=token_ids).logits, rtol=1e-5, atol=1e-5)
    for (name, one), (_, other) in zip(fused.named_parameters(), model.named_parameters(), strict=True):
        assert one.grad is not None and other.grad is not None, name
        assert float((one.grad - other.grad).norm()) <= 1e-5 * float(other.grad.norm()), name
