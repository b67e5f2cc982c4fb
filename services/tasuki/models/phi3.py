"""Phi 3 and Phi 4 (14B): fused queries, keys and values, and fused gate and up."""

from __future__ import annotations

from tasuki.models import rope
from tasuki.models.config_json import Config
from tasuki.models.family import Family, Model, full_attention, refuse_window
from tasuki.models.shape import decoder_shape


def _read(config: Config) -> Model:
    refuse_window(config, default=None)
    shape = decoder_shape(config, has_fused_qkv=True, has_fused_gate_up=True, joins_rotated=True)
    return Model(shape=shape, attention=full_attention(shape))


FAMILY = Family(
    architecture="Phi3ForCausalLM",
    read=_read,
    keys={
        "sliding_window": None,
        "resid_pdrop": None,
        "embd_pdrop": None,
        # Read for "longrope" only, which is refused.
        "original_max_position_embeddings": None,
        "interpolate_factor": (1,),
        "full_attn_mod": (1,),
    },
    rope_types=rope.DEFAULT,
)
