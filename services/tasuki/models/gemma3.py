"""Gemma 3, the text models (270M, 1B): sliding windows in most layers, with separate rotary embeddings, and query and key norms."""

from __future__ import annotations

from tasuki.models import rope
from tasuki.models.config_json import Config, cap, elements, flag, size, unsupported
from tasuki.models.family import Attention, Family, Model
from tasuki.models.gemma2 import HEAD_DIM, KEYS, NORMS, embedding_buffers
from tasuki.models.shape import QkNorm, decoder_shape

_SLIDING, _FULL = "sliding_attention", "full_attention"


def _read(config: Config) -> Model:
    if config.get("attn_logit_softcapping") is not None:
        raise unsupported(
            config, "attn_logit_softcapping", "neither transformers nor the engine caps the attention of this family"
        )
    has_bias = flag(config, "attention_bias")
    final_cap = cap(config, "final_logit_softcapping", default=None)
    shape = decoder_shape(
        config,
        is_tied=True,
        head_dim=HEAD_DIM,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm=QkNorm.HEAD,
        has_whole_embedding=True,
        **NORMS,
    )
    types, window = _layer_types(config, shape.num_layers), size(config, "sliding_window", default=4096)
    attention = Attention(
        query_scale=size(config, "query_pre_attn_scalar", default=256) ** -0.5,
        windows=tuple(window if layer_type == _SLIDING else None for layer_type in types),
    )
    return Model(
        shape=shape,
        attention=attention,
        rotary_buffers=tuple(f"{kind}_{name}" for kind in sorted(set(types)) for name in ("inv_freq", "original_inv_freq")),
        constant_buffers=embedding_buffers(shape),
        final_logit_softcap=final_cap,
    )


def _layer_types(config: Config, num_layers: int) -> list[str]:
    """Layer types as listed, or full attention in every sixth layer."""
    listed = elements(config, "layer_types", of=str)
    if listed is None:
        step = size(config, "sliding_window_pattern", default=6)
        return [_SLIDING if (layer + 1) % step else _FULL for layer in range(num_layers)]
    if len(listed) != num_layers or set(listed) - {_SLIDING, _FULL}:
        raise unsupported(config, "layer_types", f"must name {_SLIDING} or {_FULL} for each of the {num_layers} layers")
    return list(listed)


# SGLang ignores the scaling that 4B and larger models have in their full layers; those also come with a vision tower.
FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    read=_read,
    keys={**KEYS, "sliding_window_pattern": None, "rope_local_base_freq": None},
    rope_types=rope.DEFAULT,
)
