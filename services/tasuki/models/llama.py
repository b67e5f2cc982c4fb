"""Llama, and what others have trained in its form, as SmolLM2 (with tied embeddings)."""

from __future__ import annotations

from tasuki.models.config_json import Config, flag
from tasuki.models.family import Family, Model, full_attention
from tasuki.models.shape import decoder_shape


def _read(config: Config) -> Model:
    has_bias = flag(config, "attention_bias")
    shape = decoder_shape(config, has_qkv_bias=has_bias, has_output_bias=has_bias)
    return Model(shape=shape, attention=full_attention(shape))


# SGLang's MLP of Llama has no bias: a model with `mlp_bias` is refused.
FAMILY = Family(architecture="LlamaForCausalLM", read=_read, keys={"attention_bias": None, "mlp_bias": (False,)})
