"""summary.json of a run that has ended."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

_MAX_BYTES = 1_000_000


def read_summary(output_dir: Path | None) -> dict[str, Any] | None:
    """Its plain values; None while there is none that can be read."""
    if output_dir is None:
        return None
    try:
        with (output_dir / "summary.json").open("rb") as file:
            summary = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(summary, dict):
        return None
    return {name: _plain(value) for name, value in summary.items() if isinstance(value, str | int | float) or value is None}


def _plain(value: str | float | None) -> str | float | None:
    """JSON has no word for a number that is not finite, though Python writes and reads one."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
