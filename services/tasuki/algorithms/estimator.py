"""Estimators of advantages, by name."""

from enum import StrEnum
from typing import Literal

Std = Literal["none", "sample", "population"]
MAX_KL_ERROR = 0.2
"""Bound on a step's relative error for adapting kl_coef, which changes by at most this times samples / horizon."""
KL_HORIZON = 10_000.0
"""Samples over which an error of 20 % changes the coefficient of an adaptive KL penalty by 20 %."""


class Estimator(StrEnum):
    """Baseline of the advantages; tasuki.algorithms.advantages has the formulas."""

    GROUP_MEAN = "group_mean"
    LEAVE_ONE_OUT = "leave_one_out"
    GROUP_BASELINE_WHITENED = "group_baseline_whitened"
    GLOBALLY_WHITENED = "globally_whitened"
    GREEDY_BASELINE = "greedy_baseline"
    BATCH_BASELINE = "batch_baseline"
    RUNNING_BASELINE = "running_baseline"
    GAE = "gae"
    """Requires a critic."""

    @property
    def needs_groups(self) -> bool:
        """Whether groups of a single completion have no gradient."""
        return self in (Estimator.GROUP_MEAN, Estimator.LEAVE_ONE_OUT, Estimator.GROUP_BASELINE_WHITENED)
