"""Metrics of the run on the node, from the end of its metrics.jsonl."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from prometheus_client.core import GaugeMetricFamily

from tasuki.config.paths import training_output_path
from tasuki.rpc.metric_names import RUN_EVAL_SCORE, RUN_METRIC, RUN_REWARD, RUN_STEP, RUN_STEP_SECONDS
from tasuki.wire.regular_file import open_regular, read_path

_TAIL_BYTES = 1 << 18
_REWARD = "reward/"
_MAX_NAME_CHARS = 250

Step = Mapping[str, Any]
"""A line of metrics.jsonl."""


class RunFigures:
    """Newest figures of the node's last run. Each line of its file is read once."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._reading = threading.Lock()
        self._file: tuple[Path, int] | None = None
        self._offset = 0
        self._steps: dict[str, Step] = {}

    def read(self) -> None:
        """Reads new lines, at most the last 256 KiB. An incomplete line is left to the next call."""
        if not self._reading.acquire(blocking=False):
            return  # the disk has not answered an earlier call
        try:
            path = read_path(training_output_path(self._state_dir)) / "metrics.jsonl"
            with open_regular(path) as file:
                self._read(path, file)
        except OSError:
            self._file, self._steps = None, {}
        finally:
            self._reading.release()

    def families(self) -> Iterable[GaugeMetricFamily]:
        """Gauges of the newest step that updated weights, and of the newest evaluation."""
        step, reward, score, seconds, metric = (
            name.gauges() for name in (RUN_STEP, RUN_REWARD, RUN_EVAL_SCORE, RUN_STEP_SECONDS, RUN_METRIC)
        )
        steps = self._steps
        if "last" in steps:
            step.add_metric([], steps["last"]["step"])
        if "scored" in steps:
            score.add_metric([], steps["scored"]["eval_score"])
        if "learned" in steps:
            learned = steps["learned"]
            for part, value in _numbers(learned.get("seconds")).items():
                seconds.add_metric([part], value)
            for name, value in _numbers(learned["metrics"]).items():
                metric.add_metric([name], value)
                if name.startswith(_REWARD):
                    reward.add_metric([name.removeprefix(_REWARD)], value)
            if _is_number(learned.get("mean_reward")):
                reward.add_metric(["mean"], learned["mean_reward"])
        return step, reward, score, seconds, metric

    def _read(self, path: Path, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        if (path, status.st_ino) != self._file or status.st_size < self._offset:
            self._file, self._offset, self._steps = (path, status.st_ino), 0, {}
        start = max(self._offset, status.st_size - _TAIL_BYTES)
        file.seek(start)
        data = file.read(_TAIL_BYTES)
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.splitlines()[start > self._offset :]
        self._offset = start + len(whole)
        found = dict(self._steps)
        for step in filter(None, map(_step, lines)):
            found["last"] = step
            if _is_number(step.get("eval_score")):
                found["scored"] = step
            if step.get("metrics"):
                found["learned"] = step
        self._steps = found


def _step(line: bytes) -> Step | None:
    try:
        step = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return step if isinstance(step, dict) and isinstance(step.get("step"), int) and _is_number(step["step"]) else None


def _numbers(table: object) -> dict[str, float]:
    if not isinstance(table, dict):
        return {}
    # As a label, a lone surrogate cannot be encoded.
    named = {name: value for name, value in table.items() if len(name) <= _MAX_NAME_CHARS and name.isprintable()}
    return {name: value for name, value in named.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
