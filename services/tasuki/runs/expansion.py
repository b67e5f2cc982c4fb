"""The settings that a run's preset expands to, as an equivalent [train] table without the preset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasuki.algorithms.loss_types import LossConfig
from tasuki.config.algorithms import PRESETS
from tasuki.config.save import toml_lines
from tasuki.config.train_schema import TrainConfig, write_loss


def expansion(train: TrainConfig) -> str:
    """[train] as TOML: what its algorithm sets, and every key that differs from its default. Leaves out keys without a default, None
    and empty tables.
    """
    changed = train.model_dump(exclude_defaults=True, exclude_none=True)
    every = train.model_dump(exclude_none=True)
    usual = write_loss(LossConfig(loss=type(train.loss.loss)()))
    changed["loss"] = {key: value for key, value in every["loss"].items() if key == "name" or value != usual.get(key)}
    required = {name for name, field in TrainConfig.model_fields.items() if field.is_required()}
    told = {
        "algorithm": train.algorithm,
        **{key: value for key, value in _with_preset(changed, every, PRESETS[train.algorithm]).items() if key not in required},
    }
    return "\n".join(line for line in toml_lines(told, ("train",)) if line)


def _with_preset(changed: Mapping[str, Any], every: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `every` for the keys of `changed` and `preset`, as far as they exist, in the order of `every`."""
    told: dict[str, Any] = {}
    for key, value in every.items():
        if isinstance(value, Mapping) and key in preset:
            told[key] = _with_preset(changed.get(key, {}), value, preset[key])
        elif key in changed:
            told[key] = changed[key]
        elif key in preset:
            told[key] = value
    return told
