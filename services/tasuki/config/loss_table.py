"""A loss as a configuration table: `name`, the loss's own settings and the common ones, side by side."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tasuki.algorithms.loss_types import Correction, Loss, LossConfig, SettingError
from tasuki.config.table import check_kind

LOSSES: Mapping[str, type] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "_", loss.__name__.removesuffix("Loss")).lower(): loss for loss in get_args(Loss)
}
"""Losses by name: "ppo", "policy_gradient", ..."""
SHARED = tuple(
    field.name for field in dataclasses.fields(LossConfig) if field.name not in ("loss", "old_policy", "denominator")
)
"""Settings of every loss. `old_policy` is a key of [train]; `denominator` is for loops that accumulate several calls."""


def read_loss(table: Mapping[str, Any]) -> LossConfig:
    """Builds a loss from its table. Raises SettingError naming the key."""
    settings = dict(table)
    name = settings.pop("name", "ppo")
    if not isinstance(name, str) or name not in LOSSES:
        raise SettingError("name", f"{name!r} is not a loss; give one of {', '.join(LOSSES)}")
    cls = LOSSES[name]
    own = {field.name for field in dataclasses.fields(cls)}
    unknown = settings.keys() - own.union(SHARED)
    if unknown:
        raise SettingError(min(unknown), f"unknown key; {name} has {', '.join(sorted(own.union(SHARED)))}")
    if isinstance(settings.get("correction"), Mapping):
        settings["correction"] = _read_correction(settings["correction"])
    shared = {key: value for key, value in settings.items() if key in SHARED}
    loss = _built(cls, {key: value for key, value in settings.items() if key in own})
    return _built(LossConfig, {**shared, "loss": loss})


def write_loss(config: LossConfig) -> dict[str, Any]:
    """Writes the table that read_loss reads. Leaves out None."""
    name = next(name for name, cls in LOSSES.items() if isinstance(config.loss, cls))
    shared = {field: getattr(config, field) for field in SHARED if field != "correction"}
    table = {"name": name, **dataclasses.asdict(config.loss), **shared}
    table["correction"] = _without_none(dataclasses.asdict(config.correction))
    return {key: str(value) if isinstance(value, StrEnum) else value for key, value in _without_none(table).items()}


def _read_correction(table: Mapping[str, Any]) -> Correction:
    """Builds the correction from the keys in the table; an empty table disables it."""
    known = {field.name: None for field in dataclasses.fields(Correction)}
    unknown = table.keys() - known.keys()
    if unknown:
        raise SettingError(f"correction.{min(unknown)}", f"unknown key; it has {', '.join(known)}")
    return _built(Correction, {**known, **table}, below="correction.")


def _built(cls: type, settings: Mapping[str, Any], *, below: str = "") -> Any:
    """Builds the dataclass after checking its field types, on which its range checks rely."""
    for name, annotation in get_type_hints(cls).items():
        try:
            check_kind(settings.get(name), annotation)
        except ValueError as error:
            raise SettingError(f"{below}{name}", f"{error} (got {settings[name]!r})") from error
    try:
        return _adapter(cls).validate_python(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, SettingError):
            raise SettingError(f"{below}{cause.field}", cause.problem) from error
        key = below + ".".join(str(part) for part in first["loc"])
        raise SettingError(key, f"{first['msg']} (got {first['input']!r})") from error


_adapter = cache(TypeAdapter)  # takes tens of milliseconds to build


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}
