"""Llama and its near relatives: SmolLM, Mistral, Mixtral, Granite, Phi and OLMo."""

from functools import partial
from typing import Any

from tasuki.models import rope
from tasuki.models.config_json import Config, elements, num_layers, number, size, unsupported
from tasuki.models.family import (
    Attention,
    CheckpointNames,
    Family,
    Model,
    attention_biases,
    refuse_head_dim,
    refuse_layer_types,
    refuse_window,
)
from tasuki.models.shape import ModelShape, QkNorm
from tasuki.wire.errors import InvalidArgument


def _mixtral_experts(config: Config) -> dict[str, Any]:
    return {
        "num_experts": size(config, "num_local_experts"),
        "experts_per_token": size(config, "num_experts_per_tok"),
        "expert_size": size(config, "intermediate_size"),
    }


def _refuse_fractional_bases(config: Config) -> None:
    for base in rope.bases(config):
        if base != int(base):
            raise unsupported({**config, "rope_theta": base}, "rope_theta", "the engine rounds it down; give a whole number")


def _check_rotated_layers(config: Config) -> None:
    listed = elements(config, "no_rope_layers", of=int)
    size(config, "no_rope_layer_interval", default=4)
    if listed is not None and len(listed) != num_layers(config):
        problem = f"must have 1 or 0 for each of the {num_layers(config)} layers in the model's config.json, not {len(listed)} numbers"
        raise InvalidArgument("no_rope_layers", problem)


_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")


def _granite(config: Config, shape: ModelShape) -> Model:
    for key in _MULTIPLIERS:
        number(config, key, default=1.0)
    scale = number(config, "attention_multiplier", default=1.0)
    return Model(shape=shape, attention=Attention(query_scale=scale, windows=(None,) * shape.num_layers))


FAMILIES = (
    # Also models of the same form, such as SmolLM2. SGLang's Llama MLP has no bias, so models with `mlp_bias` are refused.
    Family(
        architecture="LlamaForCausalLM",
        model_type="llama",
        keys={"attention_bias": None, "mlp_bias": (False,)},
        shape_of=attention_biases,
    ),
    # Mistral 7B and similar models without a sliding window, from v0.2 on.
    Family(
        architecture="MistralForCausalLM",
        model_type="mistral",
        keys={"sliding_window": None, "layer_types": None},
        checks=(refuse_layer_types, partial(refuse_window, default=4096)),
    ),
    # Some layers rotate nothing. SGLang has no model of its own for it (rollout/sglang/models.py).
    Family(
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        keys={
            "attention_bias": None,
            "mlp_bias": (False,),
            "no_rope_layers": None,
            "no_rope_layer_interval": None,
            "use_sliding_window": (False,),
            "sliding_window": None,
            "max_window_layers": None,
            "layer_types": None,
        },
        shape={"is_tied": True},
        shape_of=attention_biases,
        checks=(refuse_layer_types, _check_rotated_layers),
    ),
    # Granite 3, dense.
    Family(
        architecture="GraniteForCausalLM",
        model_type="granite",
        keys={"attention_bias": (False,), "mlp_bias": (False,), **dict.fromkeys(_MULTIPLIERS)},
        rope_types=rope.DEFAULT,
        model_of=_granite,
    ),
    # Phi 3 and Phi 4 (14B).
    Family(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
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
        shape={"has_fused_qkv": True, "has_fused_gate_up": True, "joins_rotated": True},
        checks=(partial(refuse_window, default=None),),
    ),
    Family(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        keys={"attention_bias": None},
        rope_types=rope.DEFAULT,
        shape={
            "qk_norm": QkNorm.PROJECTION,
            "norms": (),
            "post_norms": ("post_attention_layernorm", "post_feedforward_layernorm"),
            "has_float_norms": True,
        },
        shape_of=attention_biases,
        checks=(refuse_head_dim,),
    ),
    # Experts in every layer, separate in a checkpoint as w1 (gate), w3 (up) and w2 (down) of block_sparse_moe.
    Family(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        keys={
            "sliding_window": None,
            "num_local_experts": None,
            "num_experts_per_tok": None,
            "router_jitter_noise": (0,),
            # SGLang's Mixtral would leave its LM head unset for a checkpoint with tied embeddings.
            "tie_word_embeddings": (False,),
        },
        # SGLang's Mixtral reads only the base of the rotary embedding.
        rope_types=rope.DEFAULT,
        shape_of=_mixtral_experts,
        checks=(partial(refuse_window, default=None), refuse_head_dim, _refuse_fractional_bases),
        checkpoint=CheckpointNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
)
