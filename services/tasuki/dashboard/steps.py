"""A run's metrics by step, in columns, downsampled for charts."""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasuki.runs.metrics_tail import METRICS, MetricsTail, StepFigures
from tasuki.wire.regular_file import unreadable

_READ_BYTES = 2_000_000
_MAX_NAMES = 400
"""Limit on names, since a foreign file may have any number."""
_MAX_STEP = 2**53
_MAX_VALUES = 20_000_000
"""Limit on steps times names, about 160 MB: a line without a metric costs as much as one with all."""

_Floats = NDArray[np.float64]


@dataclass
class StepColumns:
    """The steps of metrics.jsonl. `advance` reads on; other calls may come from other threads."""

    output_dir: Path
    steps: array[int] = field(default_factory=lambda: array("q"))
    columns: dict[str, array[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.problem = ""
        self._tail = MetricsTail(self.output_dir)
        self._lock = threading.Lock()

    def advance(self) -> bool:
        """Reads some of what was written since the last call. Returns whether there was anything."""
        if self._is_full():
            self.problem = f"{self.output_dir / METRICS} is too long: only steps {self.steps[0]} to {self.steps[-1]} are shown"
            return False
        try:
            figures = list(self._tail.read(max_bytes=_READ_BYTES))
            self.problem = ""
        except OSError as error:  # it may become readable
            self.problem = unreadable(self.output_dir / METRICS, error)
            return False
        with self._lock:
            for one in figures:
                if not self._is_full():
                    self._add(one)
        return bool(figures)

    def bounds(self) -> tuple[int, int] | None:
        """The first and last steps."""
        with self._lock:
            return (self.steps[0], self.steps[-1]) if self.steps else None

    def last(self) -> dict[str, float]:
        """Each metric's latest value."""
        with self._lock:
            newest = {name: _newest(column) for name, column in self.columns.items()}
        return {name: value for name, value in newest.items() if value is not None}

    def thinned(self, *, first: int, last: int, points: int) -> dict[str, Any]:
        """Steps `first` to `last` in at most `points` buckets of equally many steps.

        Each series has the mean of each bucket, plus its extremes `low` and `high` if it has several steps. None: no value.
        """
        with self._lock:
            start, stop = bisect_left(self.steps, first), bisect_left(self.steps, last + 1)
            steps = np.array(self.steps[start:stop], dtype=np.int64)
            columns = {name: np.array(column[start:stop]) for name, column in self.columns.items()}
        size = max(1, math.ceil(len(steps) / points))
        ends = [min(index + size, len(steps)) - 1 for index in range(0, len(steps), size)]
        reduced = {name: _buckets(values, size) for name, values in columns.items()}
        series = {
            name: {kind: [_shown(value) for value in row.tolist()] for kind, row in kinds.items()}
            for name, kinds in reduced.items()
        }
        return {"steps": [int(steps[end]) for end in ends], "bucket": size, "series": series}

    def _is_full(self) -> bool:
        return len(self.steps) * max(1, len(self.columns)) >= _MAX_VALUES

    def _add(self, figures: StepFigures) -> None:
        if not 0 <= figures.step < _MAX_STEP:
            return
        keep = bisect_left(self.steps, figures.step)
        if keep < len(self.steps):  # a resumed run repeats these steps
            del self.steps[keep:]
            for column in self.columns.values():
                del column[keep:]
        for name in figures.values:
            if name not in self.columns and len(self.columns) < _MAX_NAMES:
                self.columns[name] = array("d", [math.nan]) * len(self.steps)
        self.steps.append(figures.step)
        for name, column in self.columns.items():
            column.append(figures.values.get(name, math.nan))


def _newest(column: array[float]) -> float | None:
    return next((value for value in reversed(column) if not math.isnan(value)), None)


def _buckets(values: _Floats, size: int) -> dict[str, _Floats]:
    """The mean of each bucket of `size` steps, and its extremes if it has several. NaN or infinite: no value."""
    if size == 1:
        return {"mean": values}
    padded = np.full(math.ceil(len(values) / size) * size, np.nan)
    padded[: len(values)] = values
    buckets = padded.reshape(-1, size)
    is_known = ~np.isnan(buckets)
    num_known = is_known.sum(axis=1)
    # Computed in parts, since the sum of values near the largest float would overflow.
    parts = np.where(is_known, buckets, 0.0) / np.maximum(num_known, 1)[:, None]
    return {
        "mean": np.where(num_known > 0, parts.sum(axis=1), np.nan),
        "low": np.where(is_known, buckets, np.inf).min(axis=1),
        "high": np.where(is_known, buckets, -np.inf).max(axis=1),
    }


def _shown(value: float) -> float | None:
    """Six significant digits, since a chart shows no more; None for what is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Chart:
    """takes: whether the chart includes a metric. is_stacked: whether its series add up."""

    title: str
    unit: str
    takes: Callable[[str], bool]
    is_stacked: bool = False
    is_log: bool = False


def _named(*names: str) -> Callable[[str], bool]:
    return lambda name: name in names


CHARTS: Sequence[Chart] = (
    Chart("Reward", "reward", lambda name: name == "mean_reward" or name.startswith("reward/")),
    Chart("Groups whose rewards differ", "share", _named("signal_fraction")),
    Chart("Held-out score", "score", lambda name: name == "eval_score" or name.startswith(("eval/", "eval_pass"))),
    Chart("Log-prob gap, trainer - rollout", "nat", _named("log_prob_gap", "log_prob_gap_max"), is_log=True),
    Chart("Entropy", "nat", lambda name: "entropy" in name),
    Chart("KL divergence", "nat", lambda name: name == "kl" or name.endswith("_kl") or name.startswith("kl_")),
    Chart("Seconds of a step by part", "s", lambda name: name.startswith("seconds/"), is_stacked=True),
    Chart("Seconds of the changeovers by stage", "s", lambda name: name.startswith("stage_seconds/"), is_stacked=True),
    Chart("Tokens of a completion", "tokens", _named("mean_num_tokens")),
    Chart("Loss", "loss", lambda name: name == "loss" or name.endswith("_loss")),
    Chart("Gradient norm", "norm", _named("grad_norm")),
    Chart("Learning rate", "rate", _named("learning_rate")),
    Chart("Shares of samples and tokens", "share", lambda name: name.endswith("_fraction") or "clip_fraction" in name),
)
_SKIPPED = {"policy_version", "critic_version", "num_policy_steps", "num_critic_steps"}
"""Counters, shown as numbers."""
_REST = "Others"


def draw(thinned: dict[str, Any]) -> list[dict[str, Any]]:
    """Charts with data, with their series. Metrics without a chart get their own below `Others`."""
    left = {name: series for name, series in thinned["series"].items() if name not in _SKIPPED and _has_any(series)}
    charts: list[dict[str, Any]] = []
    for chart in CHARTS:
        taken = {name: left.pop(name) for name in list(left) if chart.takes(name)}  # in the order of the file, as in a step
        if taken:
            charts.append(_drawn(chart.title, chart.unit, taken, is_stacked=chart.is_stacked, is_log=chart.is_log))
    charts += [{**_drawn(name, "", {name: left[name]}), "section": _REST} for name in sorted(left)]
    return charts


def _drawn(title: str, unit: str, series: dict[str, Any], *, is_stacked: bool = False, is_log: bool = False) -> dict[str, Any]:
    named = [{"name": name.partition("/")[2] or name, **values} for name, values in series.items()]
    return {"title": title, "unit": unit, "is_stacked": is_stacked, "is_log": is_log, "series": named}


def _has_any(series: dict[str, Any]) -> bool:
    return any(value is not None for value in series["mean"])
