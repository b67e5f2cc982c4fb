"""The learning rate of every step, as a pure function."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate_at(
    step: int,
    *,
    peak: float,
    schedule: Literal["constant", "linear", "cosine"],
    warmup_steps: int,
    total_steps: int | None,
) -> float:
    """Learning rate of the step after `step` completed ones.

    Rises linearly to `peak`, reached in the first step after the warm-up, then is constant or falls to 0 at `total_steps`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return peak
    assert total_steps is not None, "the caller requires it for this schedule"
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
