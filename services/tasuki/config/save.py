"""Writes a NodeConfig as TOML from which load_config reads an equal one."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasuki.config.schema import NodeConfig


def save_config(config: NodeConfig, path: Path) -> None:
    """Writes every key that has a value, including defaults, with absolute paths."""
    write_private(path, "\n".join(toml_lines(config.model_dump(mode="python", exclude_none=True), ())) + "\n")


def write_private(path: Path, text: str) -> None:
    """Replaces a file by one for this user alone, whatever the umask."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")


def toml_lines(table: Mapping[str, Any], name: tuple[str, ...], *, comment: Callable[[str], str] = lambda _: "") -> list[str]:
    """Lines of a table and its subtables, each with a heading after an empty line. comment: of a key, such as "trainer.betas"."""
    lines = [f"[{'.'.join(map(_key, name))}]"] if name else []
    for key, value in table.items():
        if not isinstance(value, dict):
            told = comment(".".join((*name, key)))
            lines.append(f"{_key(key)} = {_value(value)}{told and f'  # {told}'}")
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", *toml_lines(value, (*name, key), comment=comment)]
    return lines


def _key(key: str) -> str:
    """Quotes a key if needed: names of rewards are the user's."""
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
            return _value(str(value.absolute()))
        case _:
            # JSON strings are TOML basic strings, except that TOML does not allow a raw DEL.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
