"""summary.json of a finished run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tasuki.wire.regular_file import read_regular, unreadable

_MAX_BYTES = 1_000_000
_MAX_CHARS = 1_000


def read_summary(output_dir: Path | None) -> tuple[dict[str, Any] | None, str]:
    """Reads plain values; None if the file is missing or unreadable. Also returns why it is unreadable."""
    if output_dir is None:
        return None, ""
    path = output_dir / "summary.json"
    try:
        summary = json.loads(read_regular(path, max_bytes=_MAX_BYTES))
    except OSError as error:
        return None, unreadable(path, error)
    except (ValueError, RecursionError) as error:
        return None, f"{path} cannot be read: it is not JSON: {error}"
    if not isinstance(summary, dict):
        return None, f"{path} cannot be read: it is not a JSON object"
    return {name: _plain(value) for name, value in summary.items() if isinstance(value, str | int | float) or value is None}, ""


def _plain(value: str | float | None) -> str | float | None:
    """JSON has no notation for non-finite numbers, although Python writes and reads them."""
    if isinstance(value, str):
        return value[:_MAX_CHARS]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
