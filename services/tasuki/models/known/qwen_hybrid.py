"""Qwen3-Next, and Qwen 3.5 dense and with experts, whose layers are gated delta nets but for full attention in every few."""

from typing import Any

from tasuki.models import rope
from tasuki.models.config_json import Config, elements, num_layers, size, unsupported
from tasuki.models.family import TOWER_KEYS, CheckpointNames, Family, attention_biases
from tasuki.models.known.qwen import check_interleaved
from tasuki.models.shape import DeltaNet, QkNorm
from tasuki.models.tower import read_tower
from tasuki.wire.errors import InvalidArgument

_ROTATED_PART = 0.25
_DELTA, _FULL = "linear_attention", "full_attention"
_KEYS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys((
        "attention_bias", "layer_types", "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim",
        "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
        # Of layers for speculation, which are neither loaded nor trained.
        "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    )),
    "attn_output_gate": (True,),
    "output_gate_type": (None, "swish", "silu"),
    "mamba_ssm_dtype": ("float32",),
}  # fmt: skip
_EXPERT_KEYS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
# Norms add 1 to their weights, in float32; a rotated part of each head comes first.
_SHAPE: dict[str, Any] = {
    "head_dim": 256,
    "qk_norm": QkNorm.HEAD,
    "has_float_norms": True,
    "has_offset_norms": True,
    "has_output_gate": True,
    "joins_rotated": True,
}


def _delta(config: Config, *, has_fused_inputs: bool = False) -> DeltaNet:
    """Raises UnsupportedModel unless every n-th layer has full attention, which is all that the engine reads."""
    depth, listed = num_layers(config), elements(config, "layer_types", of=str)
    interval = size(
        config, "full_attention_interval", default=(listed or []).index(_FULL) + 1 if _FULL in (listed or []) else 4
    )
    types = [_DELTA if (layer + 1) % interval else _FULL for layer in range(depth)]
    if listed not in (None, types):
        problem = f"the engine has full attention in every layer number {interval}, by full_attention_interval"
        raise unsupported(config, "layer_types", problem)
    key_heads, value_heads = (
        size(config, "linear_num_key_heads", default=16),
        size(config, "linear_num_value_heads", default=32),
    )
    if value_heads % key_heads:
        problem = f"{value_heads} value heads cannot share {key_heads} key heads evenly"
        raise InvalidArgument("linear_num_value_heads", problem)
    return DeltaNet(
        layers=frozenset(layer for layer, kind in enumerate(types) if kind == _DELTA),
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=size(config, "linear_key_head_dim", default=128),
        value_head_dim=size(config, "linear_value_head_dim", default=128),
        kernel_size=size(config, "linear_conv_kernel_dim", default=4),
        has_fused_inputs=has_fused_inputs,
    )


def _experts(config: Config, *, num_experts: int = 256, experts_per_token: int = 8) -> dict[str, Any]:
    """Experts in every layer, beside a gated MLP that every token passes. Numbers: if config.json lacks them."""
    inner = size(config, "moe_intermediate_size", default=512)
    return {
        "num_experts": size(config, "num_experts", default=num_experts),
        "experts_per_token": size(config, "num_experts_per_tok", default=experts_per_token),
        "expert_size": inner,
        "shared_expert_size": size(config, "shared_expert_intermediate_size", default=512),
        "has_shared_expert_gate": True,
        "intermediate_size": inner,  # of no layer
    }


def _next_shape(config: Config) -> dict[str, Any]:
    size(config, "decoder_sparse_step", default=1)  # transformers takes no 1.0
    return {"delta": _delta(config, has_fused_inputs=True), **_experts(config, num_experts=512, experts_per_token=10)}


def _refuse_two_parts(config: Config) -> None:
    """Refuses a rotated part of each head that rotary tables and config.json, of which the engine reads the latter, give differently."""
    part = config.get("partial_rotary_factor", _ROTATED_PART)
    for key in ("rope_parameters", "rope_scaling"):
        if (config.get(key) or {}).get("partial_rotary_factor", part) != part:
            reason = f"{key} has another value, and trainer and engine read one each; give both the same"
            raise unsupported({**config, "partial_rotary_factor": part}, "partial_rotary_factor", reason)


def _refuse_two_bases(config: Config) -> None:
    if len(found := set(rope.bases(config))) > 1:
        raise unsupported(config, "rope_theta", f"rotary embeddings have several bases: {', '.join(map(str, sorted(found)))}")


def _check_sections(config: Config) -> None:
    if not config.get("vision_config"):  # a text's positions are equal
        return
    parts = [(config.get(key) or {}).get("partial_rotary_factor") for key in ("rope_parameters", "rope_scaling")]
    part = next((part for part in parts if part is not None), config.get("partial_rotary_factor", _ROTATED_PART))
    check_interleaved(config, rotated=int(size(config, "head_dim", default=256) * part))


def _beside_tower(config: Config) -> dict[str, Any]:
    return {**attention_biases(config), "delta": _delta(config), "tower": read_tower(config)}


_VISION: dict[str, Any] = {
    "rope_types": rope.DEFAULT,
    "rope_notes": frozenset({"mrope_section", "mrope_interleaved"}),
    "has_partial_rope": True,
    "checks": (_refuse_two_parts, _check_sections),
    "shape": _SHAPE,
    "has_tower": True,
    "decoder_beside_tower": "model.language_model",
    "untrained": ("mtp.",),
}
FAMILIES = (
    Family(
        architecture="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        keys={
            **_KEYS,
            **dict.fromkeys(_EXPERT_KEYS),
            "norm_topk_prob": (True,),
            # SGLang has experts in every layer, no biases, and a head of its own.
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([], None),
            "attention_bias": (False,),
            "tie_word_embeddings": (False,),
            "output_gate_type": (None, "silu"),
            "use_sliding_window": (False,),
        },
        rope_types=rope.DEFAULT,
        has_partial_rope=True,
        checks=(_refuse_two_parts, _refuse_two_bases),
        shape=_SHAPE,
        shape_of=_next_shape,
        untrained=("mtp.",),
    ),
    # And 3.6 and 3.8: the text of their vision models.
    Family(
        architecture="Qwen3_5ForConditionalGeneration",
        text_module="Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        keys={**_KEYS, **dict.fromkeys(TOWER_KEYS), "mlp_only_layers": ([],)},
        shape_of=_beside_tower,
        checkpoint=CheckpointNames(decoder="model.language_model"),
        **_VISION,
    ),
    Family(
        architecture="Qwen3_5MoeForConditionalGeneration",
        text_module="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        keys={**_KEYS, **dict.fromkeys((*_EXPERT_KEYS, *TOWER_KEYS)), "mlp_only_layers": ([],), "norm_topk_prob": (True,)},
        shape_of=lambda config: {**_beside_tower(config), **_experts(config)},
        checkpoint=CheckpointNames(decoder="model.language_model", has_whole_experts=True),
        **_VISION,
    ),
)
