"""Qwen3 with experts in some or all layers, separate in a checkpoint."""

from __future__ import annotations

from tasuki.models.config_json import Config, elements, flag, num_layers, size
from tasuki.models.family import Family, Model, full_attention, refuse_layer_types
from tasuki.models.qwen2 import WINDOW_KEYS
from tasuki.models.shape import QkNorm, decoder_shape


def _read(config: Config) -> Model:
    refuse_layer_types(config)
    has_bias = flag(config, "attention_bias")
    depth = num_layers(config)
    listed, step = elements(config, "mlp_only_layers", of=int) or [], size(config, "decoder_sparse_step", default=1)
    shape = decoder_shape(
        config,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm=QkNorm.HEAD,
        # transformers 5 writes the first name.
        num_experts=size(config, "num_local_experts" if "num_local_experts" in config else "num_experts"),
        experts_per_token=size(config, "num_experts_per_tok"),
        expert_size=size(config, "moe_intermediate_size"),
        dense_layers=frozenset(layer for layer in range(depth) if layer in listed or (layer + 1) % step),
    )
    return Model(shape=shape, attention=full_attention(shape))


_EXPERT_KEYS = (
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers",
)  # fmt: skip
FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    read=_read,
    keys={**WINDOW_KEYS, "attention_bias": None, "norm_topk_prob": (False, True), **dict.fromkeys(_EXPERT_KEYS)},
)
