"""Gemma 2: a sliding window in every other layer, capped logits, four norms per layer, and scaled embeddings.

Weights of norms are stored minus one, in transformers and in SGLang.
"""

from __future__ import annotations

from typing import Any

from tasuki.models import rope
from tasuki.models.config_json import Config, cap, elements, flag, size, unsupported
from tasuki.models.family import Attention, Family, Model
from tasuki.models.shape import ModelShape, decoder_shape

HEAD_DIM = 256
NORMS: dict[str, Any] = {
    "norms": ("input_layernorm", "pre_feedforward_layernorm"),
    "post_norms": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "has_float_norms": True,
    "has_offset_norms": True,
}
KEYS = {
    "hidden_act": ("gelu_pytorch_tanh",),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": None,
    "query_pre_attn_scalar": None,
    "sliding_window": None,
    "layer_types": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": (None, False),
    # SGLang ties the LM head to the embedding, whatever the checkpoint contains.
    "tie_word_embeddings": (True,),
}


def embedding_buffers(shape: ModelShape) -> dict[str, float]:
    """The scale of the embeddings."""
    return {"model.embed_tokens.embed_scale": shape.hidden_size**0.5}


def _read(config: Config) -> Model:
    if config.get("hidden_act") is None:
        raise unsupported(
            config, "hidden_act", "the engine reads it in addition to hidden_activation; set it to gelu_pytorch_tanh"
        )
    has_bias = flag(config, "attention_bias")
    attention_cap = cap(config, "attn_logit_softcapping", default=50.0)
    final_cap = cap(config, "final_logit_softcapping", default=30.0)
    shape = decoder_shape(
        config,
        is_tied=True,
        head_dim=HEAD_DIM,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        caps_attention=attention_cap is not None,
        **NORMS,
    )
    alternating = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(shape.num_layers)]
    if elements(config, "layer_types", of=str) not in (None, alternating):
        raise unsupported(config, "layer_types", "the engine has windows in layers 0, 2, 4, ... of this family")
    window = size(config, "sliding_window", default=4096)
    attention = Attention(
        query_scale=size(config, "query_pre_attn_scalar", default=256) ** -0.5,
        windows=tuple(None if layer % 2 else window for layer in range(shape.num_layers)),
        logit_softcap=attention_cap,
    )
    return Model(
        shape=shape,
        attention=attention,
        constant_buffers=embedding_buffers(shape),
        final_logit_softcap=final_cap,
    )


FAMILY = Family(architecture="Gemma2ForCausalLM", read=_read, keys=KEYS, rope_types=rope.DEFAULT)
