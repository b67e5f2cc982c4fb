"""Metrics of a step from its samples and updates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tasuki.client.rewards import Scores
from tasuki.client.step import Step
from tasuki.client.truncation import truncated_fraction
from tasuki.client.types import Sample


def measure_samples(step: Step, generated: Sequence[tuple[list[Sample], Scores]]) -> None:
    """Adds metrics of the generated samples to the step, including samples not trained on."""
    samples = [sample for made, _ in generated for sample in made]
    rewards_S = np.concatenate([scores.rewards for _, scores in generated])
    step.num_failed_rewards = sum(scores.num_failed for _, scores in generated)
    step.mean_reward = float(rewards_S[np.isfinite(rewards_S)].mean()) if np.isfinite(rewards_S).any() else 0.0
    step.mean_num_tokens = float(np.mean([len(sample.token_ids) for sample in samples]))
    step.metrics["truncated_fraction"] = truncated_fraction(samples)
    step.metrics["inexact_fraction"] = sum(not sample.has_exact_log_probs for sample in samples) / len(samples)
    names = generated[0][1].by_name
    for name in names if len(names) > 1 else ():
        values_S = np.concatenate([scores.by_name[name] for _, scores in generated])
        if np.isfinite(values_S).any():
            step.metrics[f"reward/{name}"] = float(values_S[np.isfinite(values_S)].mean())


def averaged(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combines finite metrics over a step's updates: means, and for maxima the largest."""
    values: dict[str, list[float]] = {}
    for metrics in measured:
        for name, value in metrics.items():
            if math.isfinite(value):
                values.setdefault(name, []).append(value)
    return {name: max(each) if name.endswith("_max") else sum(each) / len(each) for name, each in values.items()}
