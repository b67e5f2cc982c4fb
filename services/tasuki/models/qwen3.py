"""Qwen3: query and key norms over each head."""

from __future__ import annotations

from tasuki.models.config_json import Config, flag
from tasuki.models.family import Family, Model, full_attention, refuse_layer_types
from tasuki.models.qwen2 import WINDOW_KEYS
from tasuki.models.shape import QkNorm, decoder_shape


def _read(config: Config) -> Model:
    refuse_layer_types(config)
    has_bias = flag(config, "attention_bias")
    shape = decoder_shape(config, head_dim=128, has_qkv_bias=has_bias, has_output_bias=has_bias, qk_norm=QkNorm.HEAD)
    return Model(shape=shape, attention=full_attention(shape))


FAMILY = Family(architecture="Qwen3ForCausalLM", read=_read, keys={**WINDOW_KEYS, "attention_bias": None})
