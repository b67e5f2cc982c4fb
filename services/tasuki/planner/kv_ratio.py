"""The largest KV cache with which everything fits."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from tasuki.planner.layout import Layout
from tasuki.planner.plan import Plan, plan
from tasuki.planner.residency import decided_again

_RATIO_STEPS = 100


def largest_kv_ratio(layout: Layout) -> float | None:
    """Finds the ratio by bisection: a larger cache never takes less memory or holds shorter sequences."""

    def is_too_large(hundredths: int) -> bool:
        tried = plan_again(replace(layout, kv_ratio=hundredths / _RATIO_STEPS))
        return not (tried.fits_gpu and tried.fits_host)

    ratio = bisect_left(range(1, _RATIO_STEPS), True, key=is_too_large) / _RATIO_STEPS
    return ratio if ratio > 0 and plan_again(replace(layout, kv_ratio=ratio)).fits else None


def plan_again(layout: Layout) -> Plan:
    """Plan of the layout, with what stays decided again where it was decided before."""
    return plan(decided_again(layout))
