"""Checked access to the values of a parsed config.json; errors name the key."""

import json
from codecs import BOM_UTF8
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, UnsupportedModel
from tasuki.wire.regular_file import read_regular

Config = Mapping[str, Any]
LFS_START = b"version https://git-lfs"
_MAX_FILE_BYTES = 100_000_000
"""The largest is the index of a model's tensors."""
_MAX_NUMBER = 2**53
_MAX_LAYERS = 10_000


def read_json_object(file: Path, *, field: str) -> dict[str, Any]:
    """Raises InvalidArgument naming `field` if the file is not a JSON object, PathPermissionDenied if it cannot be read."""
    try:
        with named_if_denied(file, key=field):
            content = read_regular(file, max_bytes=_MAX_FILE_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:  # such as a disk's
        raise InvalidArgument(field, f"{file} cannot be read: {error.strerror}") from error
    refuse_pointer(content, file, field=field)
    if content.startswith(BOM_UTF8):
        raise InvalidArgument(field, f"{file} begins with a byte-order mark, which SGLang refuses; save it without")
    try:
        table = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(field, f"{file} is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise InvalidArgument(field, f"{file} is not a JSON object")
    return table


def refuse_pointer(content: bytes, file: Path, *, field: str) -> None:
    """Raises InvalidArgument naming `field` for what Git LFS leaves in the place of a file."""
    if content.startswith(LFS_START):
        raise InvalidArgument(field, f"{file} is a Git LFS pointer: run `git lfs pull` in its folder")


def num_layers(config: Config) -> int:
    """The number of layers. Raises InvalidArgument if it is not from 1 to 10,000."""
    number = size(config, "num_hidden_layers")
    if number > _MAX_LAYERS:
        raise InvalidArgument("num_hidden_layers", f"must be at most {_MAX_LAYERS} in the model's config.json, not {number}")
    return number


def size(config: Config, key: str, *, default: int | None = None) -> int:
    """A positive integer. A missing or null key has the default; without one it raises InvalidArgument."""
    value = config.get(key, default)
    value = default if value is None else value
    if value is None:
        raise InvalidArgument(key, "missing in the model's config.json")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_NUMBER:
        raise InvalidArgument(key, f"must be a whole number from 1 to {_MAX_NUMBER} in the model's config.json, not {value!r}")
    return value


def cap(config: Config, key: str, *, default: float | None) -> float | None:
    """A positive number, or None if the key is null. Raises InvalidArgument for any other value."""
    value = config.get(key, default)
    if value is None:
        return None
    if not is_number(value) or value <= 0:
        raise InvalidArgument(key, f"must be a number above 0 or null in the model's config.json, not {value!r}")
    return float(value)


def number(config: Config, key: str, *, default: float) -> float:
    """A positive number, or the default if the key is missing. Raises InvalidArgument for any other value, including null."""
    value = config.get(key, default)
    if not is_number(value) or value <= 0:
        raise InvalidArgument(key, f"must be a number above 0 in the model's config.json, not {value!r}")
    return float(value)


def flag(config: Config, key: str, *, default: bool = False) -> bool:
    """A boolean, or the default if the key is missing. Raises InvalidArgument for any other value, including null."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise InvalidArgument(key, f"must be true or false in the model's config.json, not {value!r}")
    return value


def elements(config: Config, key: str, *, of: type) -> list[Any] | None:
    """A list with elements of one type; None if the key is missing or null. Raises InvalidArgument for any other value."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(element) is of for element in value):
        raise InvalidArgument(key, f"must be a list of {of.__name__} in the model's config.json, not {value!r}")
    return value


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a JSON value is a number; excludes NaN and infinity, which Python accepts."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_NUMBER


def architecture_of(config: Config) -> str:
    """The first name in `architectures`, or "none"."""
    architectures = config.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else "none"


def unsupported(config: Config, key: str, reason: str) -> UnsupportedModel:
    """Refusal of a key of config.json."""
    architecture = architecture_of(config)
    return UnsupportedModel(f"{architecture} with {key} {config.get(key)!r}: {reason}", architecture=architecture, field=key)
