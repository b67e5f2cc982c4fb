"""summary.json of a finished run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

_MAX_BYTES = 1_000_000


def read_summary(output_dir: Path | None) -> dict[str, Any] | None:
    """Reads plain values; None if the file is missing or unreadable."""
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
    """JSON has no notation for non-finite numbers, although Python writes and reads them."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
