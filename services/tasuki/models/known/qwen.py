"""Qwen 2 and 3, dense and with experts; Qwen 2.5 VL and 3 VL, dense, whose rotary embedding has three positions a token."""

from typing import Any

from tasuki.models import rope
from tasuki.models.config_json import Config, size, unsupported
from tasuki.models.family import TOWER_KEYS, CheckpointNames, Family, attention_biases, refuse_head_dim, refuse_layer_types
from tasuki.models.shape import QkNorm
from tasuki.models.tower import read_tower
from tasuki.wire.errors import InvalidArgument

# SGLang has no sliding window for Qwen2 and Qwen3. Without use_sliding_window the other two keys have no effect.
QWEN_KEYS = {"use_sliding_window": (False,), "sliding_window": None, "max_window_layers": None, "layer_types": None}
_EXPERT_KEYS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")),
    "norm_topk_prob": (False, True),
    "use_qk_norm": (True,),  # Qwen3-Coder's; read by neither side
    # SGLang has experts in every layer.
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}


def _qwen_experts(config: Config) -> dict[str, Any]:
    size(config, "decoder_sparse_step", default=1)  # transformers takes no 1.0
    return {
        **attention_biases(config),
        # transformers 5 writes the first name.
        "num_experts": size(config, "num_local_experts" if "num_local_experts" in config else "num_experts"),
        "experts_per_token": size(config, "num_experts_per_tok"),
        "expert_size": size(config, "moe_intermediate_size"),
    }


def _check_sections(config: Config, *, half: int) -> None:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    section = given.get("mrope_section")
    if not (isinstance(section, list) and len(section) == 3 and sum(section) == half):
        raise InvalidArgument("mrope_section", f"must be three numbers of sum {half}, half of head_dim, not {section!r}")


def check_interleaved(config: Config, *, rotated: int | None = None) -> None:
    """Checks keys that transformers and the engine read differently where they are missing. rotated: size of each head's rotated part."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    key, found = "rope_parameters.mrope_interleaved", given.get("mrope_interleaved")
    if found is not True:
        raise unsupported(
            {**config, key: found}, key, "transformers always interleaves, the engine as the key says; set it to true"
        )
    _check_sections(config, half=(size(config, "head_dim", default=128) if rotated is None else rotated) // 2)


def _check_halves(config: Config) -> None:
    _check_sections(config, half=size(config, "hidden_size") // size(config, "num_attention_heads") // 2)


FAMILIES = (
    # And Qwen2.5.
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        keys=QWEN_KEYS,
        shape={"has_qkv_bias": True},
        checks=(refuse_layer_types,),
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        keys={**QWEN_KEYS, "attention_bias": None},
        shape={"head_dim": 128, "qk_norm": QkNorm.HEAD},
        shape_of=attention_biases,
        checks=(refuse_layer_types,),
    ),
    # Experts in every layer, separate in a checkpoint.
    Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        keys={**QWEN_KEYS, "attention_bias": None, **_EXPERT_KEYS},
        shape={"qk_norm": QkNorm.HEAD},
        shape_of=_qwen_experts,
        checks=(refuse_layer_types,),
    ),
    Family(
        architecture="Qwen2_5_VLForConditionalGeneration",
        text_module="Qwen2_5_VLForCausalLM",
        model_type="qwen2_5_vl_text",
        keys={**QWEN_KEYS, **dict.fromkeys(TOWER_KEYS)},
        shape={"has_qkv_bias": True},
        shape_of=lambda config: {"tower": read_tower(config, has_windows=True)},
        checks=(refuse_layer_types, refuse_head_dim, _check_halves),
        rope_types=rope.MROPE,
        rope_notes=frozenset({"mrope_section"}),
        checkpoint=CheckpointNames(tower="visual."),
        has_tower=True,
        decoder_beside_tower="model.language_model",
    ),
    Family(
        architecture="Qwen3VLForConditionalGeneration",
        text_module="Qwen3VLForCausalLM",
        model_type="qwen3_vl_text",
        keys={"attention_bias": None, **dict.fromkeys(TOWER_KEYS)},
        shape={"head_dim": 128, "qk_norm": QkNorm.HEAD},
        shape_of=lambda config: {**attention_biases(config), "tower": read_tower(config)},
        checks=(check_interleaved,),
        rope_types=rope.DEFAULT,
        rope_notes=frozenset({"mrope_section", "mrope_interleaved"}),
        checkpoint=CheckpointNames(decoder="model.language_model"),
        has_tower=True,
        decoder_beside_tower="model.language_model",
    ),
)
