"""Qwen 3 VL, dense: a Qwen 3 whose rotary embedding has three positions a token, beside a vision tower."""

from tasuki.models import rope
from tasuki.models.config_json import Config, size, unsupported
from tasuki.models.family import TOWER_KEYS, CheckpointNames, Family, attention_biases
from tasuki.models.shape import QkNorm
from tasuki.models.tower import read_tower
from tasuki.wire.errors import InvalidArgument


def _check_positions(config: Config) -> None:
    """Checks keys that transformers and the engine read differently where they are missing."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    key, found = "rope_parameters.mrope_interleaved", given.get("mrope_interleaved")
    if found is not True:
        raise unsupported(
            {**config, key: found}, key, "transformers always interleaves, the engine as the key says; set it to true"
        )
    section, half = given.get("mrope_section"), size(config, "head_dim", default=128) // 2
    if not (isinstance(section, list) and len(section) == 3 and sum(section) == half):
        raise InvalidArgument("mrope_section", f"must be three numbers of sum {half}, half of head_dim, not {section!r}")


FAMILIES = (
    Family(
        architecture="Qwen3VLForConditionalGeneration",
        text_module="Qwen3VLForCausalLM",
        model_type="qwen3_vl_text",
        keys={"attention_bias": None, **dict.fromkeys(TOWER_KEYS)},
        shape={"head_dim": 128, "qk_norm": QkNorm.HEAD},
        shape_of=lambda config: {**attention_biases(config), "tower": read_tower(config, out_size=size(config, "hidden_size"))},
        checks=(_check_positions,),
        rope_types=rope.DEFAULT,
        rope_notes=frozenset({"mrope_section", "mrope_interleaved"}),
        checkpoint=CheckpointNames(decoder="model.language_model"),
        has_tower=True,
    ),
)
