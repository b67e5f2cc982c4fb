"""Llama, and models of the same form, such as SmolLM2 (with tied embeddings)."""

from __future__ import annotations

from tasuki.models.config_json import Config, flag
from tasuki.models.family import Family, Model, full_attention
from tasuki.models.shape import decoder_shape


def _read(config: Config) -> Model:
    has_bias = flag(config, "attention_bias")
    shape = decoder_shape(config, has_qkv_bias=has_bias, has_output_bias=has_bias)
    return Model(shape=shape, attention=full_attention(shape))


# SGLang's Llama MLP has no bias, so models with `mlp_bias` are refused.
FAMILY = Family(architecture="LlamaForCausalLM", read=_read, keys={"attention_bias": None, "mlp_bias": (False,)})
