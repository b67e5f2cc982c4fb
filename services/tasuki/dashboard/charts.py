"""Assigns a run's metrics to charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


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
