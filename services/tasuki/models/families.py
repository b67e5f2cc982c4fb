"""The supported families as a table, and lookup by config.json."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tasuki.models import rope
from tasuki.models.config_json import (
    Config,
    architecture_of,
    cap,
    elements,
    flag,
    num_layers,
    number,
    read_json_object,
    size,
    unsupported,
)
from tasuki.models.family import (
    Attention,
    CheckpointNames,
    Family,
    Model,
    check_keys,
    refuse_head_dim,
    refuse_layer_types,
    refuse_window,
)
from tasuki.models.shape import ModelShape, QkNorm, decoder_shape
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, PathNotFound, UnsupportedModel

_SLIDING, _FULL = "sliding_attention", "full_attention"
# SGLang has no sliding window for Qwen2 and Qwen3. Without use_sliding_window the other two keys have no effect.
_QWEN_KEYS = {"use_sliding_window": (False,), "sliding_window": None, "max_window_layers": None, "layer_types": None}
_EXPERT_KEYS = (
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers",
)  # fmt: skip
_GLM_KEYS = (
    "attention_bias", "use_qk_norm", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
    "first_k_dense_replace", "routed_scaling_factor", "num_nextn_predict_layers",
)  # fmt: skip
# Weights of norms are stored minus one, in transformers and in SGLang.
_GEMMA_SHAPE: dict[str, Any] = {
    "head_dim": 256,
    "is_tied": True,
    "norms": ("input_layernorm", "pre_feedforward_layernorm"),
    "post_norms": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "has_float_norms": True,
    "has_offset_norms": True,
}
_GEMMA_KEYS = {
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


def _biases(config: Config) -> dict[str, Any]:
    """Biases of queries, keys, values and outputs."""
    has_bias = flag(config, "attention_bias")
    return {"has_qkv_bias": has_bias, "has_output_bias": has_bias}


def _mixtral_experts(config: Config) -> dict[str, Any]:
    return {
        "num_experts": size(config, "num_local_experts"),
        "experts_per_token": size(config, "num_experts_per_tok"),
        "expert_size": size(config, "intermediate_size"),
    }


def _qwen_experts(config: Config) -> dict[str, Any]:
    depth = num_layers(config)
    listed, step = elements(config, "mlp_only_layers", of=int) or [], size(config, "decoder_sparse_step", default=1)
    return {
        **_biases(config),
        # transformers 5 writes the first name.
        "num_experts": size(config, "num_local_experts" if "num_local_experts" in config else "num_experts"),
        "experts_per_token": size(config, "num_experts_per_tok"),
        "expert_size": size(config, "moe_intermediate_size"),
        "dense_layers": frozenset(layer for layer in range(depth) if layer in listed or (layer + 1) % step),
    }


def _glm_experts(config: Config) -> dict[str, Any]:
    """Experts in all layers but the first, beside an MLP that every token passes."""
    inner = size(config, "moe_intermediate_size")
    first = config.get("first_k_dense_replace", 1)
    if type(first) is not int or first < 0:
        raise InvalidArgument(
            "first_k_dense_replace", f"must be a whole number from 0 in the model's config.json, not {first!r}"
        )
    number(config, "routed_scaling_factor", default=1.0)
    has_drafts = config.get("num_nextn_predict_layers") not in (None, 0)
    return {
        "num_experts": size(config, "n_routed_experts"),
        "experts_per_token": size(config, "num_experts_per_tok"),
        "expert_size": inner,
        "shared_expert_size": inner * size(config, "n_shared_experts", default=1),
        "has_router_bias": True,
        "dense_layers": frozenset(range(min(first, num_layers(config)))),
        "num_draft_layers": size(config, "num_nextn_predict_layers") if has_drafts else 0,
    }


def _refuse_fractional_bases(config: Config) -> None:
    for base in rope.bases(config):
        if base != int(base):
            raise unsupported({**config, "rope_theta": base}, "rope_theta", "the engine rounds it down; give a whole number")


def _refuse_without_hidden_act(config: Config) -> None:
    if config.get("hidden_act") is None:
        raise unsupported(
            config, "hidden_act", "the engine reads it in addition to hidden_activation; set it to gelu_pytorch_tanh"
        )


def _refuse_attention_cap(config: Config) -> None:
    if config.get("attn_logit_softcapping") is not None:
        raise unsupported(
            config, "attn_logit_softcapping", "neither transformers nor the engine caps the attention of this family"
        )


def _gemma2_shape(config: Config) -> dict[str, Any]:
    return {**_biases(config), "caps_attention": cap(config, "attn_logit_softcapping", default=50.0) is not None}


def _gemma2(config: Config, shape: ModelShape) -> Model:
    alternating = [_FULL if layer % 2 else _SLIDING for layer in range(shape.num_layers)]
    if elements(config, "layer_types", of=str) not in (None, alternating):
        raise unsupported(config, "layer_types", "the engine has windows in layers 0, 2, 4, ... of this family")
    return _gemma(
        config,
        shape,
        alternating,
        logit_softcap=cap(config, "attn_logit_softcapping", default=50.0),
        final_logit_softcap=cap(config, "final_logit_softcapping", default=30.0),
    )


def _gemma3(config: Config, shape: ModelShape) -> Model:
    types = _gemma3_layers(config, shape.num_layers)
    return _gemma(
        config,
        shape,
        types,
        final_logit_softcap=cap(config, "final_logit_softcapping", default=None),
        rotary_buffers=tuple(f"{kind}_{name}" for kind in sorted(set(types)) for name in ("inv_freq", "original_inv_freq")),
    )


def _gemma(config: Config, shape: ModelShape, types: list[str], *, logit_softcap: float | None = None, **own: Any) -> Model:
    """A model with windows in some layers and scaled embeddings. own: other fields of Model."""
    window = size(config, "sliding_window", default=4096)
    attention = Attention(
        query_scale=size(config, "query_pre_attn_scalar", default=256) ** -0.5,
        windows=tuple(window if kind == _SLIDING else None for kind in types),
        logit_softcap=logit_softcap,
    )
    scale = {"model.embed_tokens.embed_scale": shape.hidden_size**0.5}
    return Model(shape=shape, attention=attention, constant_buffers=scale, **own)


def _gemma3_layers(config: Config, num_layers: int) -> list[str]:
    """Layer types as listed, or full attention in every sixth layer."""
    listed = elements(config, "layer_types", of=str)
    if listed is None:
        step = size(config, "sliding_window_pattern", default=6)
        return [_SLIDING if (layer + 1) % step else _FULL for layer in range(num_layers)]
    if len(listed) != num_layers or set(listed) - {_SLIDING, _FULL}:
        raise unsupported(config, "layer_types", f"must name {_SLIDING} or {_FULL} for each of the {num_layers} layers")
    return list(listed)


_FAMILIES = (
    # Also models of the same form, such as SmolLM2. SGLang's Llama MLP has no bias, so models with `mlp_bias` are refused.
    Family(
        architecture="LlamaForCausalLM",
        model_type="llama",
        keys={"attention_bias": None, "mlp_bias": (False,)},
        shape_of=_biases,
    ),
    # And Qwen2.5.
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        keys=_QWEN_KEYS,
        shape={"has_qkv_bias": True},
        checks=(refuse_layer_types,),
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        keys={**_QWEN_KEYS, "attention_bias": None},
        shape={"head_dim": 128, "qk_norm": QkNorm.HEAD},
        shape_of=_biases,
        checks=(refuse_layer_types,),
    ),
    # Experts in some or all layers, separate in a checkpoint.
    Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        keys={**_QWEN_KEYS, "attention_bias": None, "norm_topk_prob": (False, True), **dict.fromkeys(_EXPERT_KEYS)},
        shape={"qk_norm": QkNorm.HEAD},
        shape_of=_qwen_experts,
        checks=(refuse_layer_types,),
    ),
    # Mistral 7B and similar models without a sliding window, from v0.2 on.
    Family(
        architecture="MistralForCausalLM",
        model_type="mistral",
        keys={"sliding_window": None, "layer_types": None},
        checks=(refuse_layer_types, partial(refuse_window, default=4096)),
    ),
    Family(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        keys=_GEMMA_KEYS,
        rope_types=rope.DEFAULT,
        shape=_GEMMA_SHAPE,
        shape_of=_gemma2_shape,
        model_of=_gemma2,
        checks=(_refuse_without_hidden_act,),
    ),
    # The text models (270M, 1B). SGLang ignores the scaling that 4B and larger models have in their full layers; those also come with a
    # vision tower.
    Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        keys={**_GEMMA_KEYS, "sliding_window_pattern": None, "rope_local_base_freq": None},
        rope_types=rope.DEFAULT,
        shape={**_GEMMA_SHAPE, "qk_norm": QkNorm.HEAD, "has_whole_embedding": True},
        shape_of=_biases,
        model_of=_gemma3,
        checks=(_refuse_attention_cap,),
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
    # GLM 4 (0414): rotates half of each head, in adjacent pairs.
    Family(
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        keys={"attention_bias": None},
        rope_types=rope.DEFAULT,
        has_partial_rope=True,
        shape={
            "head_dim": 128,
            "post_norms": ("post_self_attn_layernorm", "post_mlp_layernorm"),
            "has_fused_gate_up": True,
            "joins_rotated": True,
        },
        shape_of=lambda config: {"has_qkv_bias": flag(config, "attention_bias", default=True)},
    ),
    # GLM 4.5 and 4.6: rotates half of each head, by halves.
    Family(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        keys={
            **dict.fromkeys(_GLM_KEYS),
            "norm_topk_prob": (True,),
            "n_group": (1,),
            "topk_group": (1,),
            "tie_word_embeddings": (False,),
        },
        rope_types=rope.DEFAULT,
        has_partial_rope=True,
        shape={"joins_rotated": True},
        shape_of=lambda config: {
            **_glm_experts(config),
            "has_qkv_bias": flag(config, "attention_bias"),
            "qk_norm": QkNorm.HEAD if flag(config, "use_qk_norm") else None,
        },
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
        shape_of=_biases,
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
FAMILIES: Mapping[str, Family] = {family.architecture: family for family in _FAMILIES}


def find_family(architecture: str) -> Family:
    """Raises UnsupportedModel with the known names."""
    if architecture not in FAMILIES:
        raise UnsupportedModel(
            f"architectures: {architecture} is not supported; there are {', '.join(FAMILIES)}", architecture=architecture
        )
    return FAMILIES[architecture]


def read_model(config: Config) -> Model:
    """The model described by a parsed config.json.

    Raises UnsupportedModel naming an unsupported architecture or key, InvalidArgument naming a missing or invalid key.
    """
    family = find_family(architecture_of(config))
    check_keys(config, family)
    for check in family.checks:
        check(config)
    return family.model_of(config, decoder_shape(config, **family.shape, **family.shape_of(config)))


def read_model_shape(path: Path) -> ModelShape:
    """Reads the shape from `path`, a config.json or its folder. Raises as read_model_file."""
    return read_model_file(path).shape


def read_model_file(path: Path) -> Model:
    """Reads the model described by `path`, a config.json or its folder.

    Raises PathNotFound without the file, PathPermissionDenied, UnsupportedModel naming an unsupported architecture or key, InvalidArgument
    naming a missing or invalid key.
    """
    with named_if_denied(path, key="model"):
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            found = "is not a regular file" if file.exists() else "does not exist"
            raise PathNotFound(f"model: {file} {found}; give a config.json or its folder", path=file)
    return read_model(read_json_object(file, field="model"))
