"""OLMo 2: norms after attention and MLP instead of before, and query and key norms over all heads at once."""

from __future__ import annotations

from tasuki.models import rope
from tasuki.models.config_json import Config, flag
from tasuki.models.family import Family, Model, full_attention, refuse_head_dim
from tasuki.models.shape import QkNorm, decoder_shape

_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


def _read(config: Config) -> Model:
    refuse_head_dim(config)
    has_bias = flag(config, "attention_bias")
    shape = decoder_shape(
        config,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm=QkNorm.PROJECTION,
        norms=(),
        post_norms=_POST_NORMS,
        has_float_norms=True,
    )
    return Model(shape=shape, attention=full_attention(shape))


FAMILY = Family(architecture="Olmo2ForCausalLM", read=_read, keys={"attention_bias": None}, rope_types=rope.DEFAULT)
