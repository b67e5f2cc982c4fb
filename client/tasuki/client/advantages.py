"""Advantages of groups of completions of the same prompt. Shape suffixes: P prompts, G completions of each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Keeps a group whose rewards differ by rounding only from getting large advantages.
_STD_FLOOR = 1e-6


def group_advantages(rewards_PG: NDArray[np.floating], *, normalize_std: bool = True) -> NDArray[np.float32]:
    """Reward minus its group's mean, over the group's standard deviation unless `normalize_std` is off.

    rewards_PG: [P, G], finite. Returns [P, G]; exactly zero in a group whose rewards are equal.
    Source: GRPO, DeepSeekMath (arXiv:2402.03300) sec. 4.1.2; without the division as in Dr. GRPO (arXiv:2503.20783).
    """
    precise_PG = np.asarray(rewards_PG, dtype=np.float64)
    centered_PG = precise_PG - precise_PG.mean(axis=1, keepdims=True)
    if normalize_std:
        centered_PG /= precise_PG.std(axis=1, keepdims=True) + _STD_FLOOR
    centered_PG[~has_signal(rewards_PG)] = 0.0
    return centered_PG.astype(np.float32)


def has_signal(rewards_PG: NDArray[np.floating]) -> NDArray[np.bool_]:
    """[P], False for a group whose rewards are equal: it teaches nothing and may be left out.

    Source: the filter of DAPO's dynamic sampling (arXiv:2503.14476) sec. 3.2.
    """
    return np.ptp(rewards_PG, axis=1) > 0.0
