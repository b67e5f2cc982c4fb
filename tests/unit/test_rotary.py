"""Attention with its rotation fused, against transformers' own, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tasuki.config.trainer_schema import LoraConfig
from tasuki.trainer.backends.fsdp.lora.adapters import add_adapters, trained_parameters
from tasuki.trainer.modules.rotary import RotaryAttention, fuse_rotation
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
