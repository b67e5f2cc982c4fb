"""Evaluation: sampling of held-out prompts and metrics of their rewards. Shape suffixes: P prompts, G samples of each."""

import numpy as np
from numpy.typing import NDArray

from tasuki.client.rewards import Scores
from tasuki.client.step import shortest
from tasuki.config.train_schema import EvalConfig


def pass_at_k(correct_PG: NDArray[np.bool_] | NDArray[np.floating], k: int) -> NDArray[np.float64]:
    """Estimates for each prompt the probability that at least one of k completions is correct, without bias, from G completions.

    correct_PG: [P, G], bool, or 0 and 1 with NaN for excluded completions.
    k: at least 1. Returns [P]; NaN for a prompt with fewer than k valid completions.
    Source: Chen et al. (arXiv:2107.03374) eq. 1, 1 - C(n - c, k) / C(n, k) with c of n correct.
    """
    values_PG = np.asarray(correct_PG, dtype=np.float64)
    num_counted_P = (~np.isnan(values_PG)).sum(axis=1)
    num_wrong_P = (values_PG == 0.0).sum(axis=1)
    # A product of k ratios, since the binomials overflow. If n - c < k, one factor is 0.
    drawn_k = np.arange(k)
    wrong_left_Pk = np.maximum(num_wrong_P[:, None] - drawn_k, 0)
    left_Pk = np.maximum(num_counted_P[:, None] - drawn_k, 1)
    estimates_P = 1.0 - (wrong_left_Pk / left_Pk).prod(axis=1)
    estimates_P[num_counted_P < k] = np.nan
    return estimates_P


def prompt_means(rewards_PG: NDArray[np.floating]) -> NDArray[np.float64]:
    """Mean reward of each prompt, ignoring NaN. Returns [P]; NaN for a prompt without rewards."""
    values_PG = np.asarray(rewards_PG, dtype=np.float64)
    num_counted_P = (~np.isnan(values_PG)).sum(axis=1)
    return np.divide(np.nansum(values_PG, axis=1), num_counted_P, out=np.full(len(values_PG), np.nan), where=num_counted_P > 0)


def eval_figures(scores: Scores, settings: EvalConfig) -> dict[str, float]:
    """Metrics by name: "mean", "pass@k" for each requested k, with several rewards "mean/<name>", "failed_fraction" if any failed.

    Prompts have equal weight, however many of their completions are valid. Metrics without a valid prompt are omitted.
    scores: of P * num_samples completions, ordered by prompt.
    """
    rewards_PG = scores.rewards.reshape(-1, settings.num_samples)
    correct_PG = np.where(np.isnan(rewards_PG), np.nan, rewards_PG >= 1.0)
    by_prompt = {"mean": prompt_means(rewards_PG)}
    by_prompt |= {f"pass@{k}": pass_at_k(correct_PG, k) for k in settings.pass_at}
    if len(scores.by_name) > 1:
        by_prompt |= {f"mean/{name}": prompt_means(values.reshape(rewards_PG.shape)) for name, values in scores.by_name.items()}
    counted = {name: values_P[~np.isnan(values_P)] for name, values_P in by_prompt.items()}
    failed = {"failed_fraction": scores.num_failed / len(scores.rewards)} if scores.num_failed else {}
    return {name: shortest(values.mean()) for name, values in counted.items() if len(values)} | failed
