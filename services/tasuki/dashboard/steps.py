"""A run's metrics by step, in columns, downsampled for charts."""

import math
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasuki.coordinator.metrics_tail import METRICS, MetricsTail
from tasuki.dashboard.places import Followed

_READ_BYTES = 2_000_000
_MAX_STEP = 2**53

_LEAST_CONSTANT = 3
"""Steps after which a metric that did not vary is called constant."""
_ROUNDING = 1e-8

_Floats = NDArray[np.float64]


class StepColumns(Followed):
    """The steps of metrics.jsonl. `advance` reads on; other calls may come from other threads."""

    def __init__(self, output_dir: Path) -> None:
        super().__init__(output_dir / METRICS)
        self.output_dir = output_dir
        self.steps: array[int] = array("q")
        self.columns: dict[str, array[float]] = {}
        self._tail = MetricsTail(output_dir)
        self._lock = threading.Lock()

    def read_on(self) -> bool:
        figures = list(self._tail.read(max_bytes=_READ_BYTES))
        with self._lock:
            for one in figures:
                keep = bisect_left(self.steps, one.step)
                if keep < len(self.steps):  # a resumed run repeats these steps
                    del self.steps[keep:]
                    for column in self.columns.values():
                        del column[keep:]
                for name in one.values:
                    if name not in self.columns:
                        self.columns[name] = array("d", [math.nan]) * len(self.steps)
                self.steps.append(one.step)
                for name, column in self.columns.items():
                    column.append(one.values.get(name, math.nan))
        return bool(figures)

    def bounds(self) -> tuple[int, int] | None:
        """The first and last steps."""
        with self._lock:
            return (self.steps[0], self.steps[-1]) if self.steps else None

    def last(self) -> dict[str, float]:
        """Each metric's latest value."""
        with self._lock:
            newest = {
                name: next((value for value in reversed(column) if not math.isnan(value)), None)
                for name, column in self.columns.items()
            }
        return {name: value for name, value in newest.items() if value is not None}

    def between(self, first: int, last: int) -> tuple[NDArray[np.int64], dict[str, _Floats]]:
        """The steps from `first` to `last`, and their metrics."""
        with self._lock:
            start, stop = bisect_left(self.steps, first), bisect_left(self.steps, last + 1)
            columns = {name: np.array(column[start:stop]) for name, column in self.columns.items()}
            return np.array(self.steps[start:stop], dtype=np.int64), columns

    def without_update(self) -> dict[str, int]:
        """Number of steps that generated but changed no weights, how many of them are the newest steps in a row, and the groups of the last
        of them in which a reward failed."""
        steps, columns = self.between(0, _MAX_STEP)
        is_idle = _is_idle(columns, len(steps))
        updated = np.flatnonzero(~is_idle & ~np.isnan(columns.get("mean_num_tokens", np.full(len(steps), np.nan))))
        newest = is_idle[updated[-1] + 1 :] if len(updated) else is_idle
        failed = np.nan_to_num(columns.get("num_failed_groups", np.zeros(len(steps))))[is_idle]
        return {"count": int(is_idle.sum()), "newest": int(newest.sum()), "failed_groups": int(sum(failed[-1:]))}


def thinned(runs: Sequence[StepColumns], *, first: int, last: int, points: int) -> dict[str, Any]:
    """Metrics of several runs in the same buckets, at most `points`, of equally many step numbers; `steps` are the buckets' ends.

    Each of a metric's series, by run, has the mean of each bucket, plus its extremes `low` and `high` if it has several steps. None: no
    value. constants: metrics that vary over no run, with the first run's value.
    """
    parts = [run.between(first, last) for run in runs]
    known = np.concatenate([steps for steps, _ in parts])
    if not len(known):
        return {"steps": [], "bucket": 1, "series": {}, "without_update": [], "constants": {}}
    low, high = int(known.min()), int(known.max())
    size = (high - low) // points + 1
    buckets = np.unique((known - low) // size)
    series: dict[str, dict[int, dict[str, list[float | None]]]] = {}
    for run, (steps, columns) in enumerate(parts):
        places, starts = np.unique(np.searchsorted(buckets, (steps - low) // size), return_index=True)
        for name, values in columns.items() if len(steps) else ():
            for kind, row in (_reduced(values, starts) if size > 1 else {"mean": values}).items():
                spread = np.full(len(buckets), np.nan)
                spread[places] = row
                series.setdefault(name, {}).setdefault(run, {})[kind] = [_shown(value) for value in spread.tolist()]
    constants: dict[str, float | None] = {}
    varying: set[str] = set()
    for run in reversed(runs):
        found, others = _constants(run.between(0, _MAX_STEP)[1])
        constants |= found
        varying |= others
    steps, columns = parts[0]
    idle = np.bincount(
        np.searchsorted(buckets, (steps - low) // size), weights=_is_idle(columns, len(steps)), minlength=len(buckets)
    )
    return {
        "steps": np.minimum(high, low + (buckets + 1) * size - 1).tolist(),
        "bucket": size,
        "series": series,
        "without_update": idle.astype(int).tolist(),
        "constants": {name: value for name, value in constants.items() if name not in varying},
    }


def _is_idle(columns: Mapping[str, _Floats], count: int) -> NDArray[np.bool_]:
    """Whether each step generated but made no update."""
    none = np.full(count, np.nan)
    updates = sum(
        np.nan_to_num(columns.get(name, none)) for name in ("num_policy_steps", "num_critic_steps", "num_skipped_updates")
    )
    return ~np.isnan(columns.get("mean_num_tokens", none)) & (updates == 0)


def _constants(columns: Mapping[str, _Floats]) -> tuple[dict[str, float | None], set[str]]:
    """Metrics whose values are equal, or are 0 but for rounding: None. Also names of the others that have values."""
    found: dict[str, float | None] = {}
    for name, values in columns.items():
        known = values[~np.isnan(values)]
        is_shown = (
            name in _SKIPPED or name.startswith("log_prob_gap") or any(chart.is_kept and chart.takes(name) for chart in CHARTS)
        )
        if is_shown or len(known) < _LEAST_CONSTANT:
            continue
        if known.min() == known.max():
            found[name] = _shown(known[0])
        elif np.abs(known).max() < _ROUNDING:
            found[name] = None
    return found, {name for name, values in columns.items() if name not in found and not np.isnan(values).all()}


def _reduced(values: _Floats, starts: NDArray[np.int64]) -> dict[str, _Floats]:
    """The mean of each bucket, which begin at `starts`, and its extremes. NaN: no value."""
    counts = np.add.reduceat((~np.isnan(values)).astype(np.int64), starts)
    # Computed in parts, since the sum of values near the largest float would overflow.
    parts = np.nan_to_num(values) / np.maximum(np.repeat(counts, np.diff([*starts, len(values)])), 1)
    return {
        "mean": np.where(counts > 0, np.add.reduceat(parts, starts), np.nan),
        "low": np.fmin.reduceat(values, starts),
        "high": np.fmax.reduceat(values, starts),
    }


def _shown(value: float) -> float | None:
    """Six significant digits, since a chart shows no more; None for what is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Chart:
    """takes: whether the chart includes a metric. is_stacked: whether its series add up. is_kept: also if it is constant."""

    title: str
    unit: str
    takes: Callable[[str], bool]
    is_stacked: bool = False
    is_log: bool = False
    is_kept: bool = False


def _named(*names: str) -> Callable[[str], bool]:
    return lambda name: name in names


CHARTS: Sequence[Chart] = (
    Chart("Reward, weighted sum", "reward", _named("mean_reward"), is_kept=True),
    Chart("Signal", "share of groups whose rewards differ; deviation", _named("signal_fraction", "reward_std"), is_kept=True),
    Chart("Held-out reward, weighted sum", "reward", _named("eval_score"), is_kept=True),
    Chart("Rewards by function, unweighted", "reward", lambda name: name.startswith("reward/")),
    Chart("Held-out figures", "mean reward, unweighted; share", lambda name: name.startswith("eval/") and name != "eval/loss"),
    Chart("Loss", "loss", lambda name: name in ("loss", "eval/loss") or name.endswith("_loss")),
    Chart("Log-prob gap, trainer - rollout", "nat", _named("log_prob_gap", "log_prob_gap_max"), is_log=True),
    Chart("Entropy", "nat", lambda name: "entropy" in name),
    Chart("KL divergence", "nat", lambda name: name == "kl" or name.endswith("_kl") or name.startswith("kl_")),
    Chart("Tokens of a completion", "tokens", _named("mean_num_tokens")),
    Chart("Seconds of a step by part", "s", lambda name: name.startswith("seconds/"), is_stacked=True),
    Chart("Seconds of the changeovers by stage", "s", lambda name: name.startswith("stage_seconds/"), is_stacked=True),
    Chart("Gradient norm", "norm", _named("grad_norm")),
    Chart("Learning rate", "rate", _named("learning_rate")),
    Chart("Shares of samples and tokens", "share", lambda name: name.endswith("_fraction") or "clip_fraction" in name),
)
_SKIPPED = {"policy_version", "critic_version", "num_policy_steps", "num_critic_steps", "num_equal_groups", "num_failed_groups"}
"""Counters, shown as numbers or as a share."""


def draw(series: Mapping[str, Mapping[int, Any]], constants: Mapping[str, object]) -> list[dict[str, Any]]:
    """Charts with data, with their series. Metrics without a chart get their own below `Others`; constant ones get none.

    series and constants: as `thinned` returns them.
    """
    left: dict[str, dict[int, Any]] = {}
    for name, runs in series.items():
        known = {run: one for run, one in runs.items() if any(value is not None for value in one["mean"])}
        if known and name not in _SKIPPED:
            left[name] = known
    charts: list[dict[str, Any]] = []
    for chart in CHARTS:
        names = [name for name in left if chart.takes(name) and (chart.is_kept or name not in constants)]
        if not chart.is_stacked:  # those are in the order of the file, as in a step
            names.sort(key=lambda name: (name.startswith("eval/"), name))
        if names:
            charts.append(_drawn(chart, {name: left.pop(name) for name in names}))
    rest = sorted(left.keys() - constants.keys())
    return [*charts, *({**_drawn(Chart(name, "", _named(name)), {name: left[name]}), "section": "Others"} for name in rest)]


def _drawn(chart: Chart, taken: Mapping[str, Mapping[int, Any]]) -> dict[str, Any]:
    series: list[dict[str, Any]] = []
    for name, runs in taken.items():
        label = name.replace("eval/", "held-out ") if name.startswith("eval/") else name.partition("/")[2] or name
        series += [{"name": label, "run": run, **values} for run, values in runs.items() if not (chart.is_stacked and run)]
    told = {"title": chart.title, "unit": chart.unit, "is_stacked": chart.is_stacked, "is_log": chart.is_log}
    return {**told, "series": series}
