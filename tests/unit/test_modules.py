"""Modules that take the place of transformers' own, for every family: results, gradients and names."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tasuki.config.trainer_schema import LoraConfig
from tasuki.planner.kept_bytes import kept_in_mlp
from tasuki.planner.node import Checkpointing
from tasuki.planner.step_bytes import step_moments
from tasuki.trainer.backends.fsdp.activations import tile_mlps
from tasuki.trainer.backends.fsdp.lora.adapters import add_adapters, trained_parameters
from tasuki.trainer.backends.fsdp.model import Policy
from tasuki.trainer.modules.pointwise import GatedMlp, RmsNorm, fuse_pointwise
from tasuki.trainer.modules.rotary import RotaryAttention, fuse_rotation
from tasuki.trainer.modules.routing import BiasedRouter, ChosenRouter, Router, ScaledRouter, replace_routers
from tests.extent import crossed
from tests.models import CONFIGS, HYBRID, make_model
from tests.planned import node_with
from tests.saved_tensors import kept_bytes
from tests.unit.test_packed_attention import LENGTHS, RUNGS, pack, policy_of

SPARSE, GEMMA = ("mixtral", "qwen3_moe", "qwen3_5_moe", "qwen3_next"), ("gemma2", "gemma3", "gemma3_vision")
BIASED = ("glm4_moe", "glm4_moe_lite", "deepseek_v3")  # one dense layer, and one with an expert that every token passes
OSS = ("gpt_oss",)
ROTATED = ("llama", "llama_tied", "qwen2", "qwen2_tied", "qwen3", "qwen3_moe", "qwen2_5_vl", "qwen3_vl", "mistral", "mixtral")
CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "pointwise": fuse_pointwise,
    "rotation": fuse_rotation,
    "routers": replace_routers,
    "tiles": partial(tile_mlps, num_tokens=25),  # the last tile is shorter than the others
}


def num_replaced(kind: str, change: str) -> dict[type, int]:
    """Modules of all layers that the change replaces; norms at least, of which some layers have more."""
    of_change = {
        "pointwise": {
            RmsNorm: 0 if kind in GEMMA + HYBRID else 5,
            GatedMlp: 0 if kind in (*SPARSE[:2], *OSS) else 4 if kind == "gemma4" else 2,
        },
        "rotation": {RotaryAttention: 2 if kind in ROTATED else 0},
        "routers": {
            Router: 2 if kind in SPARSE else 0,
            BiasedRouter: int(kind in BIASED),
            ChosenRouter: 2 * (kind in OSS),
            ScaledRouter: int(kind == "deepseek_v2"),
        },
    }
    return of_change.get(change, {})


@pytest.mark.parametrize(("kind", "checkpointing"), crossed(CONFIGS, RUNGS))
def test_a_changed_model_computes_what_transformers_computes(kind: str, checkpointing: Checkpointing) -> None:
    causal_lm, batch = make_model(kind, seed=5), pack(LENGTHS)
    weights_N = torch.randn(len(batch.token_ids_N), generator=torch.Generator().manual_seed(1))

    def scored(policy: Policy) -> Tensor:
        score_N = policy(batch)[0]
        (score_N * weights_N).sum().backward()
        return score_N

    plain = policy_of(causal_lm, checkpointing=checkpointing)
    expected_N, exact = scored(plain), dict[str, Any](plain.named_parameters())
    for change, apply in CHANGES.items():
        changed = policy_of(causal_lm, checkpointing=checkpointing)
        apply(changed.causal_lm)
        counts = Counter(type(module) for module in changed.modules())
        replaced = num_replaced(kind, change)
        for each, expected in replaced.items():
            assert counts[each] == expected or (each is RmsNorm and counts[each] > expected > 0)
        assert [name for name, _ in changed.named_parameters()] == list(exact)
        if replaced and not any(replaced.values()):
            continue
        torch.testing.assert_close(scored(changed), expected_N, rtol=1e-5, atol=1e-5)
        for name, param in changed.named_parameters():
            if not param.requires_grad:
                continue  # a tower
            assert param.grad is not None
            assert (param.grad - exact[name].grad).norm() <= 1e-5 * max(1.0, exact[name].grad.norm()), (change, name)


def test_adapters_take_their_places_beside_fused_attention() -> None:
    plain, fused = make_model("qwen3", seed=5), make_model("qwen3", seed=5)
    fuse_rotation(fused)
    for causal_lm in (plain, fused):
        add_adapters(causal_lm, LoraConfig(rank=4))
    assert [name for name, _ in fused.named_parameters()] == [name for name, _ in plain.named_parameters()]
    names = [name for name, _ in trained_parameters(fused)]
    assert len(names) == 2 * 2 * 7  # A and B of seven projections in two layers
    policy = policy_of(fused)
    policy(pack(LENGTHS))[0].sum().backward()
    assert all(param.grad is not None and bool(param.grad.isfinite().all()) for _, param in trained_parameters(policy))


class Products(TorchDispatchMode):
    """Counts matrix products inside the block."""

    num_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_seen += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])  # with and without biases
@pytest.mark.parametrize(("adapted", "num_products"), [(False, 3), (True, 4 * 3)])  # an adapter adds two products
def test_keys_and_values_are_one_product_unless_an_adapter_is_between(kind: str, adapted: bool, num_products: int) -> None:
    causal_lm = make_model(kind, seed=5)
    fuse_rotation(causal_lm)
    if adapted:
        add_adapters(causal_lm, LoraConfig(rank=4))
    attention = next(module for module in causal_lm.modules() if isinstance(module, RotaryAttention))
    cos_TD = torch.ones(1, 3, attention.head_dim)

    def queries(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, layer: int) -> Tensor:
        return q_THD

    with Products() as products, torch.no_grad():
        hidden_states = torch.ones(1, 3, causal_lm.config.hidden_size)
        attention(hidden_states, position_embeddings=(cos_TD, cos_TD), layer_attention=queries)
    assert products.num_seen == num_products


def test_nothing_inside_an_mlp_is_kept() -> None:
    causal_lm, batch = make_model("llama", seed=5), pack(LENGTHS)
    sizes: list[int] = []
    for num_tokens in (sum(LENGTHS), 25):
        policy = policy_of(causal_lm)
        tile_mlps(policy.causal_lm, num_tokens=num_tokens)
        with kept_bytes(policy.parameters()) as kept:
            policy(batch)
        sizes.append(sum(kept.values()))
    # In two layers, with the input of each tile.
    inside, hidden = 4 * 96 * 4, 64 * 4
    assert sizes[0] - sizes[1] >= 2 * sum(LENGTHS) * (inside - hidden)


def test_the_planner_counts_one_tile() -> None:
    tokens = 65_536
    for checkpointing, num_kept in ((Checkpointing.FULL, 1), (Checkpointing.NONE, 28)):
        whole, tiled, same = (
            node_with(num_ranks=2, micro_batch_tokens=tokens, checkpointing=checkpointing, trainer={"mlp_tile_tokens": size})
            for size in (None, 8192, tokens)
        )
        inside = kept_in_mlp(whole, 0)
        saved = num_kept * tokens * inside - 8192 * inside + (tokens - 8192) * whole.model.intermediate_size * 2
        assert sum(step_moments(whole)["layer"].values()) - sum(step_moments(tiled)["layer"].values()) == saved
        assert step_moments(same) == step_moments(whole)
