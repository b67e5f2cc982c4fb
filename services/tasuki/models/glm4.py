"""GLM 4 (0414): rotates half of each head, in adjacent pairs; fuses gate and up; four norms per layer."""

from __future__ import annotations

from tasuki.models import rope
from tasuki.models.config_json import Config, flag
from tasuki.models.family import Family, Model, full_attention
from tasuki.models.shape import decoder_shape

_POST_NORMS = ("post_self_attn_layernorm", "post_mlp_layernorm")


def _read(config: Config) -> Model:
    has_bias = flag(config, "attention_bias", default=True)
    shape = decoder_shape(
        config, head_dim=128, has_qkv_bias=has_bias, post_norms=_POST_NORMS, has_fused_gate_up=True, joins_rotated=True
    )
    return Model(shape=shape, attention=full_attention(shape))


FAMILY = Family(
    architecture="Glm4ForCausalLM",
    read=_read,
    keys={"attention_bias": None},
    rope_types=rope.DEFAULT,
    has_partial_rope=True,
)
