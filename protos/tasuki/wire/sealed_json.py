"""JSON objects with a checksum inside, so that a damaged byte is noticed."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

_SUM = "crc32"


def sealed(fields: Mapping[str, Any]) -> str:
    """JSON text of the fields and their checksum."""
    return json.dumps({**fields, _SUM: _checksum(fields)}, indent=2)


def is_intact(fields: Mapping[str, Any]) -> bool:
    """Whether parsed fields agree with the checksum among them."""
    return fields.get(_SUM) == _checksum({name: value for name, value in fields.items() if name != _SUM})


def _checksum(fields: Mapping[str, Any]) -> int:
    """CRC-32 of the fields as canonical JSON."""
    return zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
