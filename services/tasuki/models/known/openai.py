"""gpt-oss."""

from typing import Any

from tasuki.models.config_json import Config, elements, flag, size, unsupported
from tasuki.models.family import Attention, CheckpointNames, Family, Model
from tasuki.models.shape import ModelShape

_SLIDING, _FULL = "sliding_attention", "full_attention"


def _shape(config: Config) -> dict[str, Any]:
    has_bias = flag(config, "attention_bias", default=True)
    return {
        "has_qkv_bias": has_bias,
        "has_output_bias": has_bias,
        "num_experts": size(config, "num_local_experts"),
        "experts_per_token": size(config, "num_experts_per_tok"),
        "expert_size": size(config, "intermediate_size"),
    }


def _model(config: Config, shape: ModelShape) -> Model:
    """A model with windows in layers 0, 2, 4, ..., unless listed otherwise."""
    types = elements(config, "layer_types", of=str)
    if types is None:
        types = [_FULL if layer % 2 else _SLIDING for layer in range(shape.num_layers)]
    if len(types) != shape.num_layers or set(types) - {_SLIDING, _FULL}:
        raise unsupported(config, "layer_types", f"must name {_SLIDING} or {_FULL} for each of the {shape.num_layers} layers")
    window = size({"sliding_window": 128, **config}, "sliding_window")
    windows = tuple(window if kind == _SLIDING else None for kind in types)
    return Model(shape=shape, attention=Attention(query_scale=shape.head_dim**-0.5, windows=windows, has_sinks=True))


def _refuse_other_quantization(config: Config) -> None:
    stored = config.get("quantization_config")
    if stored and (not isinstance(stored, dict) or stored.get("quant_method") != "mxfp4"):
        raise unsupported(config, "quantization_config", "only mxfp4 is dequantized")


def _refuse_without_limit(config: Config) -> None:
    if config.get("swiglu_limit") is None:
        raise unsupported(config, "swiglu_limit", "the engine reads it, and transformers computes with 7; set it to 7.0")


FAMILIES = (
    Family(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        keys={
            "attention_bias": None,
            "sliding_window": None,
            "layer_types": None,
            "num_local_experts": None,
            "num_experts_per_tok": None,
            # Read by neither side: the latter is in rope_scaling, too.
            "experts_per_token": None,
            "initial_context_length": None,
            "quantization_config": None,
            "swiglu_limit": (7.0,),
            **dict.fromkeys(("hidden_act_alpha", "swiglu_alpha"), (1.702,)),  # names of the engine and of transformers
            "tie_word_embeddings": (False,),
        },
        shape={"head_dim": 64, "has_float_norms": True, "has_biased_experts": True, "has_sinks": True},
        shape_of=_shape,
        model_of=_model,
        checks=(_refuse_without_limit, _refuse_other_quantization),
        checkpoint=CheckpointNames(has_whole_experts=True),
    ),
)
