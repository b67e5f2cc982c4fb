"""Qwen 3 VL, dense: a Qwen 3 whose rotary embedding has three positions a token, beside a vision tower."""

from tasuki.models import rope
from tasuki.models.config_json import size
from tasuki.models.family import TOWER_KEYS, CheckpointNames, Family, attention_biases
from tasuki.models.shape import QkNorm
from tasuki.models.tower import read_tower

FAMILIES = (
    Family(
        architecture="Qwen3VLForConditionalGeneration",
        text_module="Qwen3VLForCausalLM",
        model_type="qwen3_vl_text",
        keys={"attention_bias": None, **dict.fromkeys(TOWER_KEYS)},
        shape={"head_dim": 128, "qk_norm": QkNorm.HEAD},
        shape_of=lambda config: {**attention_biases(config), "tower": read_tower(config, out_size=size(config, "hidden_size"))},
        rope_types=rope.DEFAULT,
        rope_notes=frozenset({"mrope_section", "mrope_interleaved"}),
        checkpoint=CheckpointNames(decoder="model.language_model"),
        has_tower=True,
    ),
)
