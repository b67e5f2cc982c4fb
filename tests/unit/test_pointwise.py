"""Fused norms and MLPs against transformers' own, for every family; the GPU's kernels run by Triton's interpreter on a CPU."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, silu

from tasuki.trainer.backends.fsdp.pointwise import Activation, GatedMlp, RmsNorm, fuse_pointwise
from tests.models import CONFIGS, make_model

NAME = "tasuki.trainer.backends.fsdp.pointwise_triton"
NORMS = {"gemma2": 0, "gemma3": 0}
"""Fused ones of families whose norms keep their own form; the others have two in each layer and one at the end, at least."""
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


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Compiled for nobody else: Triton decides at import."""
    before = sys.modules.pop(NAME, None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = importlib.import_module(NAME)
    monkeypatch.setattr(module, "_COLUMNS", 32)
    yield module
    del sys.modules[NAME]
    if before is not None:
        sys.modules[NAME] = before


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("is_split", [False, True], ids=["two", "halves of one"])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_the_kernel_and_its_gradients_are_those_of_plain_torch(
    kernels: ModuleType, activation: Activation, is_split: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    both = 4 * torch.randn(1, 7, 2 * 75, generator=generator)
    both[0, 0, 0], both[0, 0, 1] = 80.0, -80.0
    gate, up = both.chunk(2, dim=-1) if is_split else (x.contiguous() for x in both.chunk(2, dim=-1))
    leaves = [x.detach().clone().requires_grad_() for x in (gate, up)]
    expected = (silu(leaves[0]) if activation == "silu" else gelu(leaves[0], approximate="tanh")) * leaves[1]
    grad = torch.randn(expected.shape, generator=generator)
    torch.testing.assert_close(kernels.gated_forward(gate, up, activation), expected.detach())
    gradients = kernels.gated_backward(grad, gate, up, activation)
    for one, other in zip(gradients, torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
