"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from __future__ import annotations

from tasuki.models.config_json import Config
from tasuki.models.family import Family, Model, full_attention, refuse_layer_types
from tasuki.models.shape import decoder_shape


def _read(config: Config) -> Model:
    refuse_layer_types(config)
    shape = decoder_shape(config, has_qkv_bias=True)
    return Model(shape=shape, attention=full_attention(shape))


# SGLang has no sliding window for Qwen2 and Qwen3. Without use_sliding_window the other two keys have no effect.
WINDOW_KEYS = {"use_sliding_window": (False,), "sliding_window": None, "max_window_layers": None, "layer_types": None}
FAMILY = Family(architecture="Qwen2ForCausalLM", read=_read, keys=WINDOW_KEYS)
