"""A run's configuration: where it comes from, what differs from the defaults, and all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasuki.config.load import config_of
from tasuki.config.save import toml_lines
from tasuki.config.schema import NodeConfig
from tasuki.wire.errors import TasukiError
from tasuki.wire.regular_file import read_regular

_RUN_KEYS = ("train.dataset", "train.output_dir", "train.reward.function", "train.algorithm", "sft.dataset", "sft.output_dir")
_NAMED = ("state_dir", "device", "model.path", *_RUN_KEYS)
"""Keys without a default, or from which the defaults of others follow."""
_MAX_BYTES, _MAX_CHARS = 1_000_000, 4_000


def read_settings(output_dir: Path | None, config: NodeConfig | None) -> dict[str, Any]:
    """provenance: of run.json, by name. changed: keys without or with another than their default value. toml: every key."""
    found: dict[str, Any] = {"provenance": {}, "changed": [], "toml": ""}
    if output_dir is not None:
        try:
            head = json.loads(read_regular(output_dir / "run.json", max_bytes=_MAX_BYTES))
            given = {"run": head["id"], "begun at version": head["policy_version"], **head.get("provenance", {})}
            given |= {f"content of {name}": value for name, value in head["recipe"].items() if str(value).startswith("sha256:")}
            found["provenance"] = {str(name)[:_MAX_CHARS]: str(value)[:_MAX_CHARS] for name, value in given.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # from before the run, or of another version
    if config is not None:
        given, usual = (dict(_flat(table)) for table in (config.model_dump(mode="json", exclude_none=True), _usual(config)))
        for key, value in given.items():
            is_named = key.startswith(_NAMED)
            if is_named or usual.get(key) != value:
                found["changed"].append(
                    {"key": key, "value": _told(value), "default": None if is_named else _told(usual.get(key))}
                )
        found["toml"] = "\n".join(toml_lines(config.model_dump(exclude_none=True), ()))
    return found


def _usual(config: NodeConfig) -> dict[str, Any]:
    """The defaults beside the keys without one; empty if they are no configuration by themselves."""
    table: dict[str, Any] = {}
    given = config.model_dump(mode="json", exclude_none=True)
    for key in _NAMED:
        *tables, name = key.split(".")
        source, target = given, table
        for one in tables:
            source = source.get(one, {})
            target = target.setdefault(one, {}) if source else {}
        if name in source:
            target[name] = source[name]
    try:
        return config_of(table).model_dump(mode="json", exclude_none=True)
    except TasukiError:
        return {}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _told(value: object) -> str | None:
    return None if value is None else value if isinstance(value, str) else json.dumps(value)
