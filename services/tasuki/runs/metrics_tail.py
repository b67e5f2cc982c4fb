"""Follows the lines of a run's metrics.jsonl, even across a resume, which replaces the file."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tasuki.trainer.durable.regular_file import open_regular

_MAX_LINE_BYTES = 16 << 20
_MAX_STEP = 2**53
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
        self._is_in_long_line = False

    def read(self, *, max_bytes: int | None = None) -> list[StepFigures]:
        """Reads the steps written since the last call; all steps of a replaced file. Returns none while there is no regular file.

        Skips invalid lines, and those above 16 MiB. max_bytes: stops after the line that reaches it and leaves the rest to the next call.
        """
        try:
            file = open_regular(self._path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL):
                raise
            return []
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset, self._is_in_long_line = status.st_ino, 0, False
            file.seek(self._offset)
            end = math.inf if max_bytes is None else self._offset + max_bytes
            found: list[StepFigures] = []
            while self._offset < end and (line := self._line(file)):
                if (figures := _figures(line)) is not None:
                    found.append(figures)
            return found

    def _line(self, file: BinaryIO) -> bytes:
        """The next line, or a part of a long one as a line without a step; empty before a line that is still being written."""
        line = file.readline(_MAX_LINE_BYTES)
        is_end, was_long = line.endswith(b"\n"), self._is_in_long_line
        if not is_end and not was_long and len(line) < _MAX_LINE_BYTES:
            return b""
        self._offset += len(line)
        self._is_in_long_line = not is_end
        return b"\n" if line and (was_long or not is_end) else line


def _figures(line: bytes) -> StepFigures | None:
    try:
        step = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(step, dict) or type(number := step.get("step")) is not int or not 0 <= number <= _MAX_STEP:
        return None
    values = {name: value for name, value in step.items() if name not in _NOT_FIGURES}
    for table, prefix in _TABLES.items():
        inner = values.pop(table, None)
        values |= {f"{prefix}{name}": value for name, value in inner.items()} if isinstance(inner, dict) else {}
    return StepFigures(number, {name: float(value) for name, value in values.items() if _is_number(value)})


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False
