"""Experts on a single rank: transformers' results, tensors kept by autograd, and the planner's figures for more ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tasuki.config.checks import check_model
from tasuki.models.shape import ModelShape
from tasuki.planner.kept_bytes import kept_in_parallel_experts
from tasuki.planner.node import Checkpointing, Node, Part
from tasuki.planner.presets import MODELS
from tasuki.planner.step_bytes import step_moments
from tasuki.planner.trainer_bytes import trainer_tags
from tasuki.trainer.modules.experts import ParallelExperts, replace_experts
from tests.models import CONFIGS, make_model
from tests.planned import node_with
from tests.refusal import refusing
from tests.saved_tensors import kept_bytes

NUM_TOKENS, NUM_CHOSEN = 96, 2
NUM_EXPERTS = {
    "mixtral": "num_local_experts",
    "qwen3_moe": "num_experts",
    "qwen3_5_moe": "num_experts",
    "qwen3_next": "num_experts",
    "gpt_oss": "num_local_experts",
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3"), "n_routed_experts"),
}
MOE = MODELS["qwen3-30b-a3b"]


def node_of(
    model: ModelShape, *, num_ranks: int = 8, tp_size: int = 8, critic: ModelShape | None = None, **trainer: Any
) -> Node:
    rollout = {"tp_size": tp_size, "kv_ratio": 0.6}
    node = node_with(model, num_ranks=num_ranks, checkpointing=Checkpointing.FULL, rollout=rollout, trainer=trainer)
    check_model(node.config, model, critic=critic)
    return node


def experts_of(kind: str, mesh: DeviceMesh, *, dtype: torch.dtype = torch.float32) -> tuple[Any, ParallelExperts]:
    """Returns transformers' experts and ours, with the same values in float32."""
    theirs: Any = make_model(kind, seed=3, **{NUM_EXPERTS[kind]: 6}).get_submodule("model.layers.1.mlp.experts")
    ours = ParallelExperts(theirs, mesh)
    return theirs.to(dtype), ours


def choice_of(*, hidden_size: int, num_experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draws a choice of experts that leaves out the last one."""
    generator = torch.Generator().manual_seed(1)
    hidden_TH = torch.randn(NUM_TOKENS, hidden_size, generator=generator).to(dtype).requires_grad_()
    weights_TK, chosen_TK = torch.rand(NUM_TOKENS, num_experts - 1, generator=generator).topk(NUM_CHOSEN)
    return hidden_TH, chosen_TK, weights_TK.to(dtype).requires_grad_()


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@pytest.mark.parametrize("kind", CONFIGS)
def test_only_experts_are_replaced_and_names_stay(kind: str, mesh: DeviceMesh) -> None:
    model = make_model(kind, seed=3)
    names = [name for name, _ in model.named_parameters()]
    replace_experts(model, mesh)
    assert [name for name, _ in model.named_parameters()] == names
    found = [name for name, module in model.named_modules() if isinstance(module, ParallelExperts)]
    assert found == [name for name, module in model.named_modules() if name.endswith("mlp.experts")]
    assert bool(found) is (kind in NUM_EXPERTS)


@pytest.mark.parametrize("kind", NUM_EXPERTS)
def test_results_and_gradients_are_those_of_transformers(kind: str, mesh: DeviceMesh) -> None:
    results: list[list[Tensor]] = []
    for experts in experts_of(kind, mesh):
        hidden_TH, chosen_TK, weights_TK = choice_of(hidden_size=64, num_experts=6, dtype=torch.float32)
        out_TH = experts(hidden_TH, chosen_TK, weights_TK)
        (out_TH * torch.linspace(-1.0, 1.0, out_TH.numel()).view_as(out_TH)).sum().backward()
        results.append([out_TH, *(local(each.grad) for each in (hidden_TH, weights_TK, *experts.parameters()))])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not results[1][-1][-1].any(), "the gradient of an expert that nobody chose"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autograd_keeps_the_rows_that_are_counted_and_no_cast_weights(dtype: torch.dtype, mesh: DeviceMesh) -> None:
    _, experts = experts_of("qwen3_moe", mesh)
    hidden_TH, chosen_TK, weights_TK = choice_of(hidden_size=64, num_experts=6, dtype=dtype)
    with kept_bytes([*map(local, experts.parameters())]) as kept:
        out_TH = experts(hidden_TH, chosen_TK, weights_TK)
    assert out_TH.requires_grad
    shape = replace(MOE, hidden_size=64, expert_size=32, num_experts=6, experts_per_token=NUM_CHOSEN)
    compute_dtype = "float32" if dtype is torch.float32 else "bfloat16"
    counted = kept_in_parallel_experts(node_with(shape, trainer={"compute_dtype": compute_dtype}))
    # The router's tensors are not kept here: probabilities, and the choice.
    of_router = 4 * 6 + 8 * NUM_CHOSEN
    ends = 4 * 6
    assert sum(kept.values()) == NUM_TOKENS * (counted - of_router) + ends


def test_a_rank_gathers_no_experts_and_holds_as_many() -> None:
    gathered, spread = node_of(MOE), node_of(MOE, expert_parallel=True)
    of_layer = 128 * 3 * 768 * 2048
    assert trainer_tags(spread) == trainer_tags(gathered)
    one, other = (step_moments(node)["layer"] for node in (gathered, spread))
    # Three layers, less one matrix's shard that is cast for its product; gradients likewise.
    assert one[Part.LAYERS] - other[Part.LAYERS] == 2 * (3 * of_layer - of_layer * 2 // 3 // 8)
    assert one[Part.WHOLE_GRADIENTS] - other[Part.WHOLE_GRADIENTS] == 6 * (of_layer - of_layer * 2 // 3 // 8)
    # Less is gathered, but rows that are as many in no two passes stay cached.
    assert other[Part.TORCH_CACHE] > one[Part.TORCH_CACHE] - 4 * of_layer // 8


@pytest.mark.parametrize(("num_ranks", "rows"), [(2, 2 * 8), (8, 8 * 8), (32, 32 * 4)])
def test_rows_are_counted_as_if_all_tokens_chose_one_rank(num_ranks: int, rows: int) -> None:
    assert node_of(MOE, num_ranks=num_ranks, tp_size=2, expert_parallel=True).rows_per_token == rows


@pytest.mark.parametrize(
    ("model", "settings", "problem"),
    [
        (MOE, {"num_ranks": 6}, "6 ranks cannot share 128 experts of Qwen3MoeForCausalLM evenly"),
        (MODELS["qwen2.5-7b"], {"tp_size": 4}, "Qwen2ForCausalLM has no experts"),
        (MOE, {"critic": replace(MOE, num_experts=12)}, "8 ranks cannot share 12 experts"),
    ],
)
def test_experts_that_ranks_cannot_share_are_refused(model: ModelShape, settings: dict[str, Any], problem: str) -> None:
    with refusing("trainer.expert_parallel", match=problem):
        node_of(model, expert_parallel=True, **settings)


@pytest.mark.parametrize(
    ("model", "settings", "field"),
    [
        (MODELS["qwen2.5-7b"], {"tp_size": 4, "router_aux_loss_coef": 0.1}, "trainer.router_aux_loss_coef"),
        (MOE, {"router_bias_update_rate": 0.1}, "trainer.router_bias_update_rate"),
        (
            replace(MOE, has_router_bias=True),
            {"router_bias_update_rate": 0.1, "lora": {"target_modules": ["q_proj"]}},
            "trainer.router_bias_update_rate",
        ),
    ],
)
def test_balance_that_routers_cannot_have_is_refused(model: ModelShape, settings: dict[str, Any], field: str) -> None:
    with refusing(field):
        node_of(model, **settings)
