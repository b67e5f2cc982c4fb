"""Experts on a GPU: grouped products against transformers' loop over experts, and recomputed layers.

The second needs `make native`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from tasuki.algorithms.loss_types import LossConfig
from tasuki.trainer.backends.fsdp.routing import EXPERTS
from tasuki.trainer.roles import Role
from tests.gpu.test_checkpointing_gpu import MAX_TOKENS, VOCAB_SIZE, mesh, samples_of
from tests.integration.learning import learn, metric, start_learner, whole_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
__all__ = ["mesh"]

DEVICE, NUM_TOKENS, NUM_CHOSEN = "cuda", 4096, 4
_SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "num_experts_per_tok": NUM_CHOSEN,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SIZES, head_dim=64, num_experts=64, moe_intermediate_size=512),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=8, intermediate_size=1408),
}
# In norm. A rounding to bfloat16 is up to 2^-9 of a value, and an expert has three after one another.
TOLERANCE = 0.01


def experts(kind: str, implementation: str, dtype: torch.dtype) -> Any:
    """Of the first layer, with the same weights each time."""
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    config.num_hidden_layers = 1
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation=implementation)
    found: list[nn.Module] = [module for name, module in model.named_modules() if name.endswith("mlp.experts")]
    return found[0].to(dtype)


def results(module: Any, choice: tuple[Tensor, Tensor], hidden_TH: Tensor, grad_TH: Tensor) -> dict[str, Tensor]:
    """Output and gradients."""
    hidden_TH = hidden_TH.to(module.down_proj.dtype, copy=True).requires_grad_()
    indices_TK, weights_TK = choice
    out_TH = module(hidden_TH, indices_TK, weights_TK.to(hidden_TH.dtype))
    out_TH.backward(grad_TH.to(out_TH.dtype))
    assert hidden_TH.grad is not None
    return {
        "out": out_TH.detach(),
        "hidden": hidden_TH.grad,
        "gate_up": module.gate_up_proj.grad,
        "down": module.down_proj.grad,
    }


@pytest.mark.parametrize("kind", CONFIGS)
def test_grouped_products_are_those_of_single_experts(kind: str) -> None:
    exact, loop, grouped = (
        experts(kind, *each) for each in (("eager", torch.float32), ("eager", torch.bfloat16), (EXPERTS, torch.bfloat16))
    )
    generator = torch.Generator(DEVICE).manual_seed(1)
    hidden_TH, grad_TH = (torch.randn(NUM_TOKENS, 1024, generator=generator, device=DEVICE).bfloat16() for _ in range(2))
    # Nobody chooses the last expert.
    scores_TE = torch.rand(NUM_TOKENS, exact.num_experts - 1, generator=generator, device=DEVICE)
    weights_TK, indices_TK = scores_TE.topk(NUM_CHOSEN, dim=-1)
    choice = (indices_TK, weights_TK.bfloat16().float())
    expected = results(exact, choice, hidden_TH, grad_TH)
    for module in (loop, grouped):
        found = results(module, choice, hidden_TH, grad_TH)
        off = {name: float((found[name].float() - tensor).norm() / tensor.norm()) for name, tensor in expected.items()}
        assert max(off.values()) < TOLERANCE, (module is grouped, off)
        assert not found["gate_up"][-1].any() and not found["down"][-1].any()


@pytest.mark.parametrize("kind", CONFIGS)
def test_recomputed_experts_have_the_same_gradients(kind: str, mesh: DeviceMesh, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.bfloat16).save_pretrained(tmp_path)
    gradients: list[dict[str, Tensor]] = []
    for rung in ("none", "attention", "full"):
        learner = start_learner(
            tmp_path, mesh=mesh, checkpointing=rung, compute_dtype="bfloat16", micro_batch_tokens=MAX_TOKENS, export_stays=True
        )
        report = learn(learner, Role.POLICY, samples_of(0), config=LossConfig(), max_tokens=MAX_TOKENS)
        assert metric(report, "expert_load_max") >= 1.0
        gradients.append(whole_gradients(learner, Role.POLICY))
        learner.backend.close()
    scale = max(float(gradient.norm()) for gradient in gradients[0].values())
    for found in gradients[1:]:
        for name, expected in gradients[0].items():
            assert float((found[name] - expected).norm()) <= TOLERANCE * (float(expected.norm()) + 1e-2 * scale), name
