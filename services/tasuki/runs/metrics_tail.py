"""Follows the lines of a run's metrics.jsonl, even across a resume, which replaces the file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TABLES = {"metrics": "", "seconds": "seconds/", "stage_seconds": "stage_seconds/"}
"""Tables of a step, by the prefix of their metrics' names."""
_NOT_FIGURES = {"step", "position", "estimator"}


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The tracked metrics of one step."""

    step: int
    values: Mapping[str, float]
    """Finite values: the step's own by name, those of its tables as `reward/exact`, `seconds/generate`, `stage_seconds/SYNC`."""


class MetricsTail:
    def __init__(self, output_dir: Path) -> None:
        self._path = output_dir / "metrics.jsonl"
        self._inode, self._offset = 0, 0

    def read(self, *, max_bytes: int | None = None) -> list[StepFigures]:
        """Reads the steps written since the last call; all steps of a replaced file. Returns None while there is no file.

        Skips invalid lines. max_bytes: stops after the line that reaches it and leaves the rest to the next call.
        """
        try:
            with self._path.open("rb") as file:
                inode, size = (status := self._path.stat()).st_ino, status.st_size
                if inode != self._inode or size < self._offset:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                lines = file.readlines(-1 if max_bytes is None else max_bytes)
        except FileNotFoundError:
            return []
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        self._offset += sum(map(len, lines))
        return [figures for line in lines if (figures := _figures(line)) is not None]


def _figures(line: bytes) -> StepFigures | None:
    try:
        step = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(step, dict) or not isinstance(step.get("step"), int):
        return None
    values = {name: value for name, value in step.items() if name not in _NOT_FIGURES}
    for table, prefix in _TABLES.items():
        inner = values.pop(table, None)
        values |= {f"{prefix}{name}": value for name, value in inner.items()} if isinstance(inner, dict) else {}
    return StepFigures(step["step"], {name: float(value) for name, value in values.items() if _is_number(value)})


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False
