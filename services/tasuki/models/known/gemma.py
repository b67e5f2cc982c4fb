"""Gemma 2, 3 and 4."""

from dataclasses import replace
from typing import Any

from tasuki.models import rope
from tasuki.models.config_json import Config, cap, elements, flag, size, unsupported
from tasuki.models.family import Attention, CheckpointNames, Family, Model, attention_biases
from tasuki.models.shape import LayerSizes, ModelShape, QkNorm

_SLIDING, _FULL = "sliding_attention", "full_attention"
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


def _refuse_scaled_windows(config: Config) -> None:
    """Refuses a scaled rotary embedding of layers with windows, which the engine does not scale."""
    tables = config.get("rope_parameters") or {}
    for table in (tables, tables.get(_SLIDING) or {}, *filter(None, [(config.get("rope_scaling") or {}).get(_SLIDING)])):
        if table.get("rope_type", table.get("type", "default")) != "default":
            raise unsupported(
                config, "rope_parameters", f"the engine scales layers with {_FULL} only; give each kind of layer a table"
            )


def _gemma2_shape(config: Config) -> dict[str, Any]:
    return {**attention_biases(config), "caps_attention": cap(config, "attn_logit_softcapping", default=50.0) is not None}


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
    softcap = cap(config, "final_logit_softcapping", default=None)
    return _gemma(config, shape, types, final_logit_softcap=softcap, rotary_buffers=_tables(types))


def _tables(types: list[str]) -> tuple[str, ...]:
    """Buffers of the rotary embeddings of each kind of layer."""
    return tuple(f"{kind}_{name}" for kind in sorted(set(types)) for name in ("inv_freq", "original_inv_freq"))


def _gemma(config: Config, shape: ModelShape, types: list[str], *, logit_softcap: float | None = None, **own: Any) -> Model:
    attention = Attention(
        query_scale=size(config, "query_pre_attn_scalar", default=256) ** -0.5,
        windows=_windows(config, types, default=4096),
        logit_softcap=logit_softcap,
    )
    scale = {"model.embed_tokens.embed_scale": shape.hidden_size**0.5}
    return Model(shape=shape, attention=attention, constant_buffers=scale, **own)


def _windows(config: Config, types: list[str], *, default: int) -> tuple[int | None, ...]:
    window = size(config, "sliding_window", default=default)
    return tuple(window if kind == _SLIDING else None for kind in types)


def _gemma3_layers(config: Config, num_layers: int) -> list[str]:
    """Layer types as listed, or full attention in every sixth layer."""
    listed = elements(config, "layer_types", of=str)
    if listed is None:
        step = size(config, "sliding_window_pattern", default=6)
        return [_SLIDING if (layer + 1) % step else _FULL for layer in range(num_layers)]
    if len(listed) != num_layers or set(listed) - {_SLIDING, _FULL}:
        raise unsupported(config, "layer_types", f"must name {_SLIDING} or {_FULL} for each of the {num_layers} layers")
    return list(listed)


def _refuse_other_gemma4(config: Config) -> None:
    """Refuses what transformers and the engine read differently."""
    tables = config.get("rope_parameters")
    for kind, name in ((_SLIDING, "default"), (_FULL, "proportional")):
        table = {} if tables is None else tables.get(kind, {})
        if tables is not None and (table.get("rope_type") != name or "rope_theta" not in table):
            raise unsupported(config, "rope_parameters", f"needs a table with rope_type {name!r} and a rope_theta for {kind}")
    if ((tables or {}).get(_SLIDING) or {}).get("partial_rotary_factor", 1.0) != 1.0:
        raise unsupported(config, "rope_parameters", f"transformers rotates whole heads in {_SLIDING}, the engine a part")
    if size(config, "vocab_size_per_layer_input", default=262_144) != config.get("vocab_size"):
        raise unsupported(config, "vocab_size_per_layer_input", "trainer and engine agree on that of vocab_size only")


def _with_global_sizes(config: Config, types: list[str], shape: ModelShape) -> Config:
    """Sizes of full layers under the keys of published models, where transformers writes `per_layer_config` from 5.19 on."""
    is_same, table = flag(config, "attention_k_eq_v"), config.get("per_layer_config")
    if table is not None:
        full = [index for index, kind in enumerate(types) if kind == _FULL]
        listed = {layer.zfill(5): own for layer, own in table.items()} if isinstance(table, dict) else {"": None}
        own: Any = next(iter(listed.values()), {})
        is_one = isinstance(own, dict) and listed == {f"{index:05}": own for index in full if own}
        if not is_one or own.keys() - {"head_dim", "num_key_value_heads"}:
            problem = "trainer and engine take one head_dim and num_key_value_heads for all full layers"
            raise unsupported(config, "per_layer_config", problem)
        sizes = {
            "global_head_dim": own.get("head_dim", shape.head_dim),
            "num_global_key_value_heads": own.get("num_key_value_heads", shape.num_kv_heads if is_same else None),
        }
        for key, value in sizes.items():
            if config.get(key, value) != value:
                problem = f"{key} is {config[key]}: that of transformers before 5.19, unless config.json gives {value}"
                raise unsupported(config, "per_layer_config", problem)
        config = {**config, **sizes}
    if (config.get("num_global_key_value_heads") is not None) is not is_same:
        problem = "transformers reads it with attention_k_eq_v alone, the engine in any case; give both or neither"
        raise unsupported(config, "num_global_key_value_heads", problem)
    return config


def _gemma4(config: Config, shape: ModelShape) -> Model:
    """The last layers take keys and values of the last layer of their kind before them."""
    types, num_shared = _gemma3_layers(config, shape.num_layers), config.get("num_kv_shared_layers") or 0
    own = types[: len(types) - num_shared]
    if types[-1] != _FULL:
        raise unsupported(config, "layer_types", f"transformers makes the last one {_FULL}, the engine does not")
    if not 0 <= num_shared < len(types) or set(types) - set(own):
        raise unsupported(config, "num_kv_shared_layers", "leaves no layer of some kind with keys and values to share")
    config = _with_global_sizes(config, types, shape)
    is_wide, is_same = flag(config, "use_double_wide_mlp"), flag(config, "attention_k_eq_v")
    kv_heads = {_SLIDING: shape.num_kv_heads, _FULL: size(config, "num_global_key_value_heads", default=shape.num_kv_heads)}
    head_dims = {_SLIDING: shape.head_dim, _FULL: size(config, "global_head_dim", default=512)}
    if shape.num_heads % kv_heads[_FULL]:
        raise unsupported(config, "num_global_key_value_heads", f"{shape.num_heads} attention heads cannot share them evenly")
    if head_dims[_FULL] % 2:
        raise unsupported(config, "global_head_dim", "a rotary embedding needs an even number")
    sizes = tuple(
        LayerSizes(
            intermediate_size=shape.intermediate_size * (2 if is_wide and index >= len(own) else 1),
            num_kv_heads=kv_heads[kind],
            head_dim=head_dims[kind],
            has_own_keys=index < len(own),
            has_value_projection=index < len(own) and not (is_same and kind == _FULL),
        )
        for index, kind in enumerate(types)
    )
    input_size = config.get("hidden_size_per_layer_input", 256) and size(config, "hidden_size_per_layer_input", default=256)
    scaled = {"embed_tokens": shape.hidden_size, "embed_tokens_per_layer": input_size}
    return Model(
        shape=replace(
            shape,
            layer_sizes=sizes,
            intermediate_size=max(each.intermediate_size for each in sizes),
            num_kv_heads=min(kv_heads.values()),
            head_dim=max(head_dims.values()),
            layer_input_size=input_size,
        ),
        attention=Attention(query_scale=1.0, windows=_windows(config, types, default=512)),
        constant_buffers={f"model.{name}.embed_scale": width**0.5 for name, width in scaled.items() if width},
        final_logit_softcap=cap(config, "final_logit_softcapping", default=None),
        rotary_buffers=_tables(types),
    )


_GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "keys": {**_GEMMA_KEYS, "sliding_window_pattern": None, "rope_local_base_freq": None},
    "rope_types": rope.DEFAULT | {"linear"},
    "shape": {**_GEMMA_SHAPE, "qk_norm": QkNorm.HEAD, "has_whole_embedding": True},
    "shape_of": attention_biases,
    "model_of": _gemma3,
    "checks": (_refuse_attention_cap, _refuse_scaled_windows),
}
FAMILIES = (
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
    # The text models: 270M and 1B.
    Family(architecture="Gemma3ForCausalLM", **_GEMMA3),
    # The text of the others.
    Family(
        architecture="Gemma3ForConditionalGeneration",
        text_module="Gemma3ForCausalLM",
        checkpoint=CheckpointNames(decoder="language_model.model"),
        untrained=("vision_tower.", "multi_modal_projector."),
        text_defaults={
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
        decoder_beside_tower="model.language_model",
        **_GEMMA3,
    ),
    # The text of Gemma 4, without experts.
    Family(
        architecture="Gemma4ForConditionalGeneration",
        text_module="Gemma4ForCausalLM",
        model_type="gemma4_text",
        keys={
            **_GEMMA_KEYS,
            **dict.fromkeys(("query_pre_attn_scalar", "attn_logit_softcapping"), (None,)),
            **dict.fromkeys(("attention_k_eq_v", "num_global_key_value_heads", "global_head_dim", "num_kv_shared_layers")),
            **dict.fromkeys(("use_double_wide_mlp", "vocab_size_per_layer_input", "hidden_size_per_layer_input")),
            "per_layer_config": None,
            "attention_bias": (False,),
            "enable_moe_block": (False,),
            "use_bidirectional_attention": (None, "vision"),
        },
        rope_types=frozenset({"default", "proportional"}),
        has_partial_rope=True,
        shape={
            **_GEMMA_SHAPE,
            "qk_norm": QkNorm.HEAD,
            "has_whole_embedding": True,
            "has_offset_norms": False,
            "has_value_norm": True,
            "has_layer_scalars": True,
        },
        model_of=_gemma4,
        checks=(_refuse_other_gemma4,),
        checkpoint=CheckpointNames(decoder="model.language_model"),
        untrained=tuple(f"model.{name}." for name in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")),
        text_defaults={"tie_word_embeddings": True},
        decoder_beside_tower="model.language_model",
    ),
)
