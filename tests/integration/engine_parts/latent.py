"""Latent attention of an engine: its projections after a sync, and what it caches."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.models.deepseek_common import deepseek_weight_loader

from tasuki.models.families import read_model
from tasuki.planner.rollout_bytes import kv_bytes_per_token
from tasuki.rollout.sglang import latent
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
    latent._view_projections(model)
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
