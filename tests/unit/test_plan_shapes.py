"""Counts of the planner against the tensors of torch and transformers."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLTextConfig,
    SmolLM3Config,
)

from tasuki.config.schema import NodeConfig
from tasuki.memory.arena import NativeAllocator
from tasuki.memory.granularity import arena_bytes, export_bytes
from tasuki.models.known import read_model
from tasuki.models.shape import DeltaNet, ModelShape
from tasuki.planner.choose import choices_of
from tasuki.planner.kept_bytes import kept_per_token
from tasuki.planner.node import GB, MIB, Part
from tasuki.planner.presets import MODELS
from tasuki.planner.rollout_bytes import engine_weights, kv_bytes_per_token, kv_pool
from tasuki.planner.trainer_bytes import shards, trainer_tags
from tasuki.rollout.arguments import engine_arguments
from tasuki.rollout.model import ModelFacts
from tasuki.trainer.attention.blocks import OwnBlocks
from tasuki.trainer.attention.delta import PlainDelta
from tasuki.trainer.attention.packed import IMPLEMENTATION, LayerAttention
from tasuki.trainer.attention.padded import PRODUCTS_UP_TO, PaddedSequences
from tasuki.trainer.attention.shared import SharedSequences
from tasuki.trainer.modules.gated_delta import replace_delta_nets
from tasuki.trainer.modules.routing import replace_routers
from tasuki.weights.chunk_memory import new_arena
from tasuki.wire.stages import MemoryTag
from tests.planned import chosen_node, node_with
from tests.saved_tensors import kept_bytes

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
GLM_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
LATENT: dict[str, Any] = {
    **TINY,
    **GLM_EXPERTS,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
}
V3 = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
GEMMA: dict[str, Any] = {**TINY, "head_dim": 32, "sliding_window": 128, "hidden_act": "gelu_pytorch_tanh"}
GEMMA4 = {
    **{key: value for key, value in GEMMA.items() if key != "hidden_act"},
    "num_hidden_layers": 4,
    "global_head_dim": 48,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": TINY["vocab_size"],
}
CONFIGS = {
    "llama": LlamaConfig(**TINY),
    "llama with biases": LlamaConfig(**TINY, attention_bias=True),
    "qwen2": Qwen2Config(**TINY),
    "qwen2, tied": Qwen2Config(**TINY, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**TINY, head_dim=32),
    "qwen3 with biases": Qwen3Config(**TINY, head_dim=32, attention_bias=True),
    "qwen3-moe": Qwen3MoeConfig(**TINY, **EXPERTS),
    "qwen3-vl": Qwen3VLTextConfig(**TINY, head_dim=32, rope_parameters={**MROPE, "mrope_section": [8, 4, 4]}),
    "qwen3.5": Qwen3_5TextConfig(**TINY, **DELTA, full_attention_interval=2),
    "qwen3.5, attention": Qwen3_5TextConfig(**TINY, head_dim=32, full_attention_interval=1),
    "qwen3.5-moe, attention": Qwen3_5MoeTextConfig(
        **{key: size for key, size in TINY.items() if key != "intermediate_size"},
        **EXPERTS,
        shared_expert_intermediate_size=56,
        full_attention_interval=1,
    ),
    "qwen3-next": Qwen3NextConfig(
        **TINY, **EXPERTS | DELTA, shared_expert_intermediate_size=56, layer_types=["linear_attention"] * 2 + ["full_attention"]
    ),
    "mistral": MistralConfig(**TINY, head_dim=24, sliding_window=None),
    "gemma2": Gemma2Config(**GEMMA),
    "gemma3": Gemma3TextConfig(**GEMMA, layer_types=["sliding_attention"] * 2 + ["full_attention"]),
    **dict.fromkeys(
        ("gemma4", "gemma4, 1", "gemma4, 3"),
        Gemma4TextConfig(**GEMMA4, hidden_size_per_layer_input=24, num_kv_shared_layers=2, use_double_wide_mlp=True),
    ),
    "gemma4, values of keys, 1": Gemma4TextConfig(
        **GEMMA4, hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1
    ),
    "granite": GraniteConfig(**TINY, residual_multiplier=0.5),
    "phi3": Phi3Config(**TINY | {"pad_token_id": 0}),
    "glm4": Glm4Config(**TINY | {"pad_token_id": 0}, head_dim=32),
    "glm4 without biases": Glm4Config(**TINY | {"pad_token_id": 0}, head_dim=32, attention_bias=False),
    "glm4-moe": Glm4MoeConfig(**TINY, **GLM_EXPERTS, first_k_dense_replace=0, use_qk_norm=True, attention_bias=True),
    "glm4-moe, first dense": Glm4MoeConfig(**TINY, **GLM_EXPERTS),
    **dict.fromkeys(
        ("gpt-oss", "gpt-oss, balanced"),
        GptOssConfig(**TINY, head_dim=32, num_local_experts=8, num_experts_per_tok=2, swiglu_limit=7.0),
    ),
    "deepseek2": DeepseekV2Config(**LATENT, topk_method="greedy", scoring_func="softmax", q_lora_rank=None),
    "deepseek3": DeepseekV3Config(**LATENT, **V3, q_lora_rank=36, first_k_dense_replace=0),
    "deepseek3, first dense": DeepseekV3Config(**LATENT, **V3, q_lora_rank=36, first_k_dense_replace=1),
    "glm4-moe-lite": Glm4MoeLiteConfig(**LATENT | {"v_head_dim": 32}, q_lora_rank=36, first_k_dense_replace=1),
    "smollm3": SmolLM3Config(**TINY | {"pad_token_id": 0}),
    "olmo2": Olmo2Config(**TINY),
    "mixtral": MixtralConfig(**TINY, num_local_experts=8, num_experts_per_tok=2),
}


def model_of(config: PreTrainedConfig, *, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) is not None else "sdpa"
    if config.model_type == "gpt_oss":
        attention = IMPLEMENTATION  # transformers has none in torch that is fused
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).train()


def table_of(config: PreTrainedConfig, model: Any) -> dict[str, Any]:
    return config.to_dict() | {"architectures": [type(model).__name__]}


def shape_from(config: PreTrainedConfig, model: Any) -> ModelShape:
    return read_model(table_of(config, model)).shape


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_of_a_model_is_counted_once(name: str):
    model = model_of(CONFIGS[name], device="meta")
    shape = shape_from(CONFIGS[name], model)
    root, *layers = shape.units()
    ours = dict(root) | {f"layers.{index}.{key}": value for index, layer in enumerate(layers) for key, value in layer.items()}
    assert ours == {key.removeprefix("model."): tuple(value.shape) for key, value in model.named_parameters()}
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "num_parameters"), [("qwen2.5-0.5b", 494_032_768), ("qwen2.5-7b", 7_615_616_512)])
def test_published_shapes_have_as_many_parameters_as_transformers_makes_of_them(name: str, num_parameters: int):
    shape = MODELS[name]
    config = Qwen2Config(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.context_length,
        tie_word_embeddings=shape.is_tied,
    )
    model = model_of(config, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.num_parameters == num_parameters
    assert shape_from(config, model) == shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_keeps_as_many_bytes_for_backward_as_predicted(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    num_tokens = 128  # whole chunks of gated delta nets
    model = model_of(CONFIGS[name], device="cpu", dtype=dtype)
    replace_delta_nets(model)
    index = int(name[-1]) if name.startswith("gemma4,") else 0
    layer = model.model.layers[index]
    hidden = torch.randn(1, num_tokens, TINY["hidden_size"], dtype=dtype, requires_grad=True)
    positions = torch.arange(num_tokens)[None]
    types = (model.config.layer_types[index],) if name.startswith(("gemma3", "gemma4")) else ()
    rotary = model.model.rotary_emb(hidden, positions, *types)
    described = read_model(table_of(CONFIGS[name], model))
    shape, cu_seqlens_S = described.shape, torch.tensor([0, num_tokens], dtype=torch.int32)
    packed: dict[str, Any] = {}
    if shape.is_delta(0):
        packed["layer_attention"] = LayerAttention(cast(Any, None), described.attention, PlainDelta(cu_seqlens_S))
    if shape.layer_sizes:
        keys = torch.randn(1, 2, num_tokens, shape.at(index).head_dim, dtype=dtype, requires_grad=True)
        packed["shared_kv_states"] = {"full_attention": (keys, keys)}
    if shape.layer_input_size:
        packed["per_layer_input"] = torch.randn(1, num_tokens, shape.layer_input_size, dtype=dtype, requires_grad=True)
    if shape.has_sinks:
        sequences = SharedSequences(OwnBlocks.of(cu_seqlens_S, num_tokens))
        replace_routers(model)
        layer.mlp.router.is_balanced = name.endswith("balanced")
        packed["layer_attention"] = LayerAttention(sequences, described.attention)
    if shape.latent is not None:
        # Plain torch has no fused attention for values that are smaller than keys; ours pads them.
        monkeypatch.setitem(PRODUCTS_UP_TO, "cpu", 0)
        model.set_attn_implementation(IMPLEMENTATION)
        packed["layer_attention"] = LayerAttention(PaddedSequences.of(cu_seqlens_S, num_tokens), described.attention)
    shared = [rotary] if isinstance(rotary, torch.Tensor) else rotary
    given = [packed[each] for each in ("per_layer_input",) if each in packed]
    given += packed.get("shared_kv_states", {}).get("full_attention", ())[:1]
    with kept_bytes([*layer.parameters(), *layer.buffers(), *shared, *given]) as kept:
        output = layer(hidden, attention_mask=None, position_embeddings=rotary, **packed)
    # Token counts per expert, and norm weights plus one, or in float32; neither grows with the tokens.
    once = 4 * shape.num_experts if shape.is_sparse(0) else 0
    if shape.has_offset_norms or (shape.has_value_norm and dtype is torch.bfloat16):
        offset = [param for key, param in layer.named_parameters() if "norm" in key and "linear_attn" not in key]
        once += 4 * sum(param.numel() for param in offset)
    if shape.is_delta(0):
        # Zeros before the sequence, what each head keeps, and the gated norm's weight in float32.
        delta = cast(DeltaNet, shape.delta)
        once += (delta.kernel_size - 1) * delta.conv_size * dtype.itemsize + 2 * 4 * delta.num_value_heads
        once += 4 * delta.value_head_dim if dtype is torch.bfloat16 else 0
    trainer = {"compute_dtype": str(dtype).removeprefix("torch."), "router_aux_loss_coef": 0.1 * name.endswith("balanced")}
    node = node_with(shape, device="cpu", micro_batch_tokens=num_tokens, trainer=trainer)
    predicted = num_tokens * kept_per_token(node, index) + once
    # GLM 4 keeps its part of the rotary table for each layer; Mixtral and Qwen 3.5 the sums that normalize the router's scores, DeepSeek
    # more of them.
    rel = (
        0.02
        if name.startswith(("glm4", "mixtral", "qwen3.5-moe", "qwen3-next"))
        or (shape.latent is not None and shape.is_sparse(0))
        else 0
    )
    assert sum(kept.values()) == pytest.approx(predicted, rel=rel)
    assert output is not None


def test_tags_of_a_trainer_are_those_that_were_measured():
    # docs/benchmarks.md, one rank with the shapes of Qwen2.5-1.5B on an H200.
    tags = {part: round(size / GB, 1) for part, size in trainer_tags(node_with("qwen2.5-1.5b")).items()}
    assert tags == {Part.TRAINER_WEIGHTS: pytest.approx(7.3, abs=0.11), Part.GRADIENTS: 6.4, Part.OPTIMIZER: 12.7}


def test_shards_are_padded_to_the_largest_on_every_rank():
    shape = MODELS["qwen2.5-7b"]
    ranks = {count: node_with(shape, num_ranks=count) for count in (1, 7)}
    tensors = [torch.empty(size, device="meta") for unit in shape.units() for size in unit.values()]
    largest = sum(torch.chunk(tensor, 7)[0].numel() for tensor in tensors)
    assert sum(math.prod(shard) for shard in shards(ranks[7])) == largest > shape.num_parameters / 7
    assert sum(math.prod(shard) for shard in shards(ranks[1])) == shape.num_parameters


def test_an_embedding_that_the_engine_does_not_split_is_on_every_rank():
    table = {**GEMMA, "hidden_size": 1024, "vocab_size": 262_144, "model_type": "gemma3_text"}
    table["architectures"] = ["Gemma3ForCausalLM"]
    whole, split = (replace(read_model(table).shape, has_whole_embedding=is_whole) for is_whole in (True, False))
    sizes = [engine_weights(node_with(model, rollout={"tp_size": 2})) for model in (whole, split)]
    assert read_model(table).shape == whole
    assert sizes[0] - sizes[1] == pytest.approx(262_144 * 1024, abs=64 * MIB)  # half of it, in bfloat16


@pytest.mark.parametrize(
    ("tensors", "num_bytes"),
    [
        ([], 0),
        ([1], 64 * MIB),
        ([63 * MIB, 512], 128 * MIB),
        ([2**30], 2**30),
        # The second, slightly above 1 GiB, starts in a chunk that is made an eighth larger than the existing memory.
        ([2**30, 2 * MIB], 2**30 + 128 * MIB),
    ],
)
def test_arenas_round_up_to_chunks(tensors: list[int], num_bytes: int):
    assert arena_bytes(tuple(tensors)) == num_bytes


def test_arenas_on_a_cpu_have_smaller_chunks_and_no_small_tensors():
    assert arena_bytes((2047, 100), device="cpu") == 0
    assert arena_bytes((2048, 100), device="cpu") == 2 * MIB
    assert arena_bytes((64 * MIB, 2048), device="cpu") == 72 * MIB


def test_copies_on_a_gpu_have_chunks_of_equal_size():
    assert export_bytes(0) == 0
    assert export_bytes(3 * 2**30) == 3 * 2**30
    assert export_bytes(2**30 + 1) == 2**30 + 2 * MIB
    assert export_bytes(2**70) == 2**70  # at once, of a model that no machine holds


@pytest.mark.parametrize("num_bytes", [3000, 64 * MIB, 65 * MIB, 301 * MIB + 1])
def test_an_arena_of_copies_has_the_chunks_of_a_real_one(num_bytes: int):
    arena = new_arena(num_bytes, device=torch.device("cpu"))
    address = arena.allocate(num_bytes)
    assert arena.usage().total_bytes == export_bytes(num_bytes, device="cpu")
    arena.free(address)
    arena.close()


@pytest.mark.parametrize("kv_tokens", [None, 5000])
def test_a_cache_on_a_cpu_has_the_tokens_that_the_engine_is_asked_for(kv_tokens: int | None, tmp_path: Path):
    shape = MODELS["qwen2.5-0.5b"]
    settings = {"engine": {} if kv_tokens is None else {"max_total_tokens": kv_tokens}, "context_length": 4096}
    node = NodeConfig.model_validate({"state_dir": tmp_path, "model": {"path": tmp_path}, "rollout": settings})
    facts = ModelFacts(
        path="", architecture="", vocab_size=shape.vocab_size, context_length=4096, stop_token_ids=(1,), is_seeded=True
    )
    planned = chosen_node(node, shape, host_bytes=24 * GB)
    given = engine_arguments(node, choices_of(planned), facts)
    asked = given["max_total_tokens"]
    arena = NativeAllocator(tags=[MemoryTag.KV_CACHE], device="cpu").arena(MemoryTag.KV_CACHE)
    buffers = 2 * shape.num_layers
    # As ReqToTokenPool.
    slots = given["max_running_requests"] + 1, given["context_length"] + 4
    sizes = [4 * math.prod(slots), *[(asked + 1) * kv_bytes_per_token(planned) // buffers] * buffers]
    addresses = [arena.allocate(size) for size in sizes]
    assert kv_pool(planned, taken_bytes=0).num_bytes == arena.usage().total_bytes
    for address in addresses:
        arena.free(address)
    arena.close()
