"""What single models need: latent attention, GLM's routers, and the dtype of convolutions' latest inputs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.configs.mamba_utils import mamba2_state_dtype
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.models.deepseek_common import deepseek_weight_loader
from sglang.srt.models.glm4_moe import Glm4MoeGate
from sglang.srt.models.glm4_moe_lite import Glm4MoeLiteGate
from torch.nn.functional import linear

from tasuki.config.schema import NodeConfig
from tasuki.models.known import read_model
from tasuki.planner.rollout_bytes import kv_bytes_per_token
from tasuki.rollout.__main__ import engine_environment
from tasuki.rollout.model import ModelFacts
from tasuki.rollout.sglang.models import install_live_routers, view_projections
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
