"""Joins the answers of several ranks or nodes. Pure; no torch, since a fleet's front uses it too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasuki.v1.trainer_pb2 import MetricPart


def merge_parts(parts: Sequence[Mapping[str, MetricPart]]) -> dict[str, MetricPart]:
    """Merges the metrics of all that reported a part."""
    joined: dict[str, MetricPart] = {}
    for name in sorted({name for part in parts for name in part}):
        metrics = [part[name] for part in parts if name in part]
        totals = [metric.total for metric in metrics]
        joined[name] = MetricPart(
            total=max(totals) if metrics[0].is_maximum else sum(totals),
            weight=sum(metric.weight for metric in metrics),
            is_maximum=metrics[0].is_maximum,
        )
    return joined


def merge_metrics(parts: Mapping[str, MetricPart]) -> dict[str, float]:
    """Means and maxima; leaves out means over nothing."""
    return {
        name: part.total if part.is_maximum else part.total / part.weight
        for name, part in parts.items()
        if part.is_maximum or part.weight
    }
