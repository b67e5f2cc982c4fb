"""The last step of the run that trains on the node, from its metrics.jsonl."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import GaugeMetricFamily

from tasuki.config.places import training_output_path
from tasuki.rpc.metric_names import RUN_EVAL_SCORE, RUN_METRIC, RUN_REWARD, RUN_STEP, RUN_STEP_SECONDS

_TAIL_BYTES = 1 << 18
_REWARD = "reward/"


def last_steps(state_dir: Path) -> list[Mapping[str, Any]]:
    """The newest steps of the node's last run, oldest first; none where nothing can be read. A line that is torn off is left out."""
    try:
        metrics = Path(training_output_path(state_dir).read_text().strip()) / "metrics.jsonl"
        with metrics.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(start)
            lines = file.read(_TAIL_BYTES).splitlines(keepends=True)[1 if start else 0 :]
    except OSError:
        return []
    return [step for line in lines if line.endswith(b"\n") and (step := _step(line)) is not None]


def run_families(steps: list[Mapping[str, Any]]) -> Iterable[GaugeMetricFamily]:
    """Gauges of the newest step that learned, and of the newest evaluation."""
    step, reward, score, seconds, metric = (
        name.gauges() for name in (RUN_STEP, RUN_REWARD, RUN_EVAL_SCORE, RUN_STEP_SECONDS, RUN_METRIC)
    )
    if steps:
        step.add_metric([], steps[-1]["step"])
    scores = [one["eval_score"] for one in steps if _is_number(one.get("eval_score"))]
    if scores:
        score.add_metric([], scores[-1])
    learned = next((one for one in reversed(steps) if one.get("metrics")), None)
    if learned is not None:
        for part, value in _numbers(learned.get("seconds")).items():
            seconds.add_metric([part], value)
        for name, value in _numbers(learned["metrics"]).items():
            metric.add_metric([name], value)
            if name.startswith(_REWARD):
                reward.add_metric([name.removeprefix(_REWARD)], value)
        if _is_number(learned.get("mean_reward")):
            reward.add_metric(["mean"], learned["mean_reward"])
    return step, reward, score, seconds, metric


def _step(line: bytes) -> Mapping[str, Any] | None:
    try:
        step = json.loads(line)
    except ValueError:
        return None
    return step if isinstance(step, dict) and isinstance(step.get("step"), int) else None


def _numbers(table: object) -> dict[str, float]:
    if not isinstance(table, dict):
        return {}
    return {str(name): value for name, value in table.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
