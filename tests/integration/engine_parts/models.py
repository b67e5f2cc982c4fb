"""What single models need: latent attention, GLM's routers, Gemma 4's cache, and the dtype of convolutions' latest inputs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.configs.mamba_utils import mamba2_state_dtype
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
from sglang.srt.models.deepseek_common import deepseek_weight_loader
from sglang.srt.models.glm4_moe import Glm4MoeGate
from sglang.srt.models.glm4_moe_lite import Glm4MoeLiteGate
from torch.nn.functional import linear

from tasuki.config.schema import NodeConfig
from tasuki.models.known import read_model
from tasuki.planner.rollout_bytes import kv_bytes_per_token
from tasuki.rollout.__main__ import engine_environment
from tasuki.rollout.model import ModelFacts
from tasuki.rollout.sglang.models import install_layer_sizes, install_live_routers, view_projections
from tests.models import CONFIGS
from tests.planned import node_with

HEADS, NOPE, VALUE, RANK = 3, 6, 4, 10
derive = deepseek_weight_loader.DeepseekV2WeightLoaderMixin.post_load_weights  # SGLang's own, before it is replaced


def attention() -> Any:
    weight = torch.nn.Parameter(torch.randn(HEADS * (NOPE + VALUE), RANK), requires_grad=False)
    sizes = {"qk_nope_head_dim": NOPE, "v_head_dim": VALUE, "w_kc": None, "w_vc": None, "w_scale": 1.0}
    return SimpleNamespace(**sizes, kv_b_proj=SimpleNamespace(weight=weight), attn_mha=SimpleNamespace(kv_b_proj=None))


def test_projections_are_sglangs_and_follow_a_weight_that_is_written_in_place() -> None:
    one = attention()
    layers = SimpleNamespace(layers=[SimpleNamespace(self_attn=one)], start_layer=0, end_layer=1)
    model: Any = SimpleNamespace(model=layers, quant_config=None, config=SimpleNamespace(num_hidden_layers=1))
    view_projections(model)
    for seed in (1, 2):
        one.kv_b_proj.weight.data.copy_(
            torch.randn(HEADS * (NOPE + VALUE), RANK, generator=torch.Generator().manual_seed(seed))
        )
        theirs = attention()
        theirs.kv_b_proj = one.kv_b_proj
        layers.layers[0].self_attn = theirs
        derive(model)
        assert torch.equal(one.w_kc, theirs.w_kc) and torch.equal(one.w_vc, theirs.w_vc)
    assert {each.untyped_storage().data_ptr() for each in (one.w_kc, one.w_vc)} == {one.kv_b_proj.weight.data_ptr()}


def test_the_cache_takes_the_bytes_that_are_planned_on_every_rank() -> None:
    shape = read_model(CONFIGS["deepseek_v3"]().to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}).shape
    assert shape.latent is not None
    sizes = {"kv_lora_rank": shape.latent.kv_rank, "qk_rope_head_dim": shape.latent.rope_dim, "layer_num": shape.num_layers}
    pool = MLATokenToKVPool(100, 1, torch.bfloat16, **sizes, device="cpu", enable_memory_saver=False)
    for tp_size in (1, 2):
        planned = kv_bytes_per_token(node_with(shape, rollout={"tp_size": tp_size}))
        assert cast(int, pool.get_kv_size_bytes()) == 101 * planned


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_dense"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_cache_of_layers_of_different_sizes_takes_what_is_planned_and_keeps_each_layers_heads(
    kind: str, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, pool_type, configurator = (
        read_model(CONFIGS[kind]().to_dict()).shape,
        MHATokenToKVPool,
        cast(Any, DefaultPoolConfigurator),
    )
    for owner, name in (
        (pool_type, "_create_buffers_normal"),
        (pool_type, "_store_kv_layer"),
        (configurator, "_compute_cell_size"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored in the end
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(attn_tp_size=tp_size))
    install_layer_sizes(shape)
    sizes = {"head_num": shape.num_kv_heads, "head_dim": shape.head_dim, "layer_num": shape.num_layers}
    pool: Any = pool_type(100, 1, torch.bfloat16, **sizes, device="cpu", enable_memory_saver=False)
    planned = kv_bytes_per_token(node_with(shape, rollout={"tp_size": tp_size}))
    assert sum(cast(Any, pool.get_kv_size_bytes())) == 101 * planned
    assert configurator._compute_cell_size(None, SimpleNamespace(kv_cache_dtype=torch.bfloat16), shape.num_layers) == planned
    slots = torch.tensor([7, 3])
    for index in range(2):
        keys, values = torch.randn(2, 2, *pool.k_buffer[index].shape[1:], dtype=torch.bfloat16)
        pool.set_kv_buffer(cast(Any, SimpleNamespace(layer_id=index)), slots, keys, values)
        assert torch.equal(pool.get_key_buffer(index)[slots], keys) and torch.equal(pool.get_value_buffer(index)[slots], values)
    assert [tuple(each.shape[1:]) for each in pool.k_buffer] == [
        (max(1, layer.num_kv_heads // tp_size), layer.head_dim) for layer in shape.layer_sizes if layer.has_own_keys
    ]


@pytest.mark.parametrize("kind", [Glm4MoeGate, Glm4MoeLiteGate])
def test_a_router_follows_its_weight(kind: Any) -> None:
    install_live_routers()
    gate = kind(SimpleNamespace(n_routed_experts=5, hidden_size=16)).to(torch.bfloat16)
    hidden_TH = torch.randn(7, 16, dtype=torch.bfloat16)
    for seed in (1, 2):
        gate.weight.data.copy_(torch.randn(5, 16, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(gate(hidden_TH), linear(hidden_TH.float(), gate.weight.float()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_latest_inputs_of_convolutions_have_the_engines_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str):
    config = NodeConfig.model_validate({"state_dir": tmp_path, "model": {"path": tmp_path}, "rollout": {"dtype": dtype}})
    facts = ModelFacts(
        path="", architecture="Qwen3NextForCausalLM", vocab_size=10, context_length=10, stop_token_ids=(), is_seeded=False
    )
    name = "SGLANG_MAMBA_CONV_DTYPE"
    monkeypatch.setenv(name, engine_environment(config, facts, temp_dir=tmp_path)[name])
    assert mamba2_state_dtype().conv == getattr(torch, dtype)
