"""Follows the lines of a run's metrics.jsonl, even across a resume, which replaces the file."""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tasuki.wire.line_reader import LineReader
from tasuki.wire.regular_file import open_regular

METRICS = "metrics.jsonl"
_MAX_STEP = 2**53
_MAX_NAME_CHARS = 250
"""Limit of MLflow."""
_TABLES = {"metrics": "", "seconds": "seconds/", "stage_seconds": "stage_seconds/"}
"""Tables of a step, by the prefix of their metrics' names."""
_NOT_FIGURES = {"step", "position", "estimator"}


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The tracked metrics of one step."""

    step: int
    values: Mapping[str, float]
    """Finite values: the step's own by name, those of its tables as `reward/exact`, `seconds/generate`, `stage_seconds/SYNC`."""
    metrics: Mapping[str, float]
    """Those of the table `metrics` alone, empty for a step that has learned nothing."""


class MetricsTail:
    def __init__(self, output_dir: Path) -> None:
        self.output_dir, self._path = output_dir, output_dir / METRICS
        self._inode, self._reader = 0, LineReader()

    def read(self, *, max_bytes: int | None = None) -> Iterator[StepFigures]:
        """Yields the steps written since the last call; all steps of a replaced file; none while there is no file.

        Skips invalid lines, and those above 16 MiB. max_bytes: stops after the line that reaches it and leaves the rest to the next call.
        Raises OSError if the file cannot be read.
        """
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._reader.offset:
                self._inode, self._reader = status.st_ino, LineReader()
            end = math.inf if max_bytes is None else self._reader.offset + max_bytes
            for line in self._reader.lines(file):
                if (figures := _figures(line)) is not None:
                    yield figures
                if self._reader.offset >= end:
                    return


def _figures(line: bytes) -> StepFigures | None:
    try:
        step = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(step, dict) or type(number := step.get("step")) is not int or not 0 <= number <= _MAX_STEP:
        return None
    values, metrics = {name: value for name, value in step.items() if name not in _NOT_FIGURES}, step.get("metrics")
    for table, prefix in _TABLES.items():
        inner = values.pop(table, None)
        values |= {f"{prefix}{name}": value for name, value in inner.items()} if isinstance(inner, dict) else {}
    return StepFigures(number, _finite(values), _finite(metrics) if isinstance(metrics, dict) else {})


def _finite(values: Mapping[str, object]) -> dict[str, float]:
    """Numbers that a float can hold, which an integer may not be, under names that trackers take."""
    return {
        name: float(value)
        for name, value in values.items()
        if len(name) <= _MAX_NAME_CHARS and name.isprintable() and isinstance(value, int | float)
        if not isinstance(value, bool) and abs(value) <= sys.float_info.max
    }
