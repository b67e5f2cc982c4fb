"""Writes a NodeConfig as TOML that load_config reads back as the same."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasuki.config.schema import NodeConfig


def save_config(config: NodeConfig, path: Path) -> None:
    """Every key that has a value, defaults included; paths absolute."""
    path.write_text("\n".join(toml_lines(config.model_dump(mode="python", exclude_none=True), ())) + "\n")


def toml_lines(table: Mapping[str, Any], name: tuple[str, ...]) -> list[str]:
    """The lines of a table and of those below it, each with its heading and an empty line before it."""
    lines = [f"[{'.'.join(map(_key, name))}]"] if name else []
    lines += [f"{_key(key)} = {_value(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", *toml_lines(value, (*name, key))]
    return lines


def _key(key: str) -> str:
    """Names of rewards are the user's, and may need quotes."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(_value(item) for item in value)}]"
        case Path():
            return json.dumps(str(value.absolute()))
        case _:
            # A JSON string is a TOML basic string; only DEL is legal in the one and not in the other.
            return json.dumps(value).replace("\x7f", "\\u007f")
