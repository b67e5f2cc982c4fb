"""Evaluation: sampling of held-out prompts and metrics of their rewards. Shape suffixes: P prompts, G samples of each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasuki.algorithms.effects import check_eval_sampling
from tasuki.algorithms.setting import SettingError
from tasuki.client.rewards import Scores
from tasuki.client.types import SamplingParams
from tasuki.wire.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """Sampling and metrics of an evaluation. Raises InvalidArgument naming an invalid field."""

    num_samples: int = 1
    """Completions per prompt."""
    temperature: float = 0.0
    top_p: float | None = None
    """None takes SGLang's default, also for the fields below."""
    top_k: int | None = None
    max_new_tokens: int | None = None
    pass_at: tuple[int, ...] = ()
    """Values of k for which pass@k is reported, each at most num_samples."""
    correct_at: float = 1.0
    """Minimum reward of a correct completion."""

    def __post_init__(self) -> None:
        for field in ("num_samples", "max_new_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InvalidArgument(f"eval.{field}", f"is {value}; it must be at least 1")
        if not 0.0 <= self.temperature < math.inf:
            raise InvalidArgument("eval.temperature", f"is {self.temperature:g}; give 0, which is greedy, or more")
        if self.num_samples > 1 and self.temperature == 0.0:
            problem = f"is 0, so all {self.num_samples} samples of a prompt would be equal; raise it, or set num_samples to 1"
            raise InvalidArgument("eval.temperature", problem)
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InvalidArgument("eval.top_p", f"is {self.top_p:g}; it must be above 0 and at most 1")
        if self.top_k is not None and self.top_k < 1 and self.top_k != -1:
            raise InvalidArgument("eval.top_k", f"is {self.top_k}; it must be at least 1, or -1 for the whole vocabulary")
        for k in self.pass_at:
            if not 1 <= k <= self.num_samples:
                raise InvalidArgument("eval.pass_at", f"{k} is not between 1 and num_samples, {self.num_samples}")
        if not math.isfinite(self.correct_at):
            raise InvalidArgument("eval.correct_at", f"is {self.correct_at:g}; it must be finite")
        try:
            check_eval_sampling(self)
        except SettingError as error:
            raise InvalidArgument(f"eval.{error.field}", error.problem) from error

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k
        )


def pass_at_k(correct_PG: NDArray[np.bool_] | NDArray[np.floating], k: int) -> NDArray[np.float64]:
    """Estimates for each prompt the probability that at least one of k completions is correct, without bias, from G completions.

    correct_PG: [P, G], bool, or 0 and 1 with NaN for excluded completions.
    Returns [P]; NaN for a prompt with fewer than k valid completions. Raises InvalidArgument for k below 1.
    Source: Chen et al. (arXiv:2107.03374) eq. 1, 1 - C(n - c, k) / C(n, k) with c of n correct.
    """
    if k < 1:
        raise InvalidArgument("k", f"is {k}; it must be at least 1")
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


def eval_figures(scores: Scores, settings: EvalSettings) -> dict[str, float]:
    """Metrics by name: "mean", "pass@k" for each requested k and, with several rewards, "mean/<name>".

    Prompts have equal weight, however many of their completions are valid. Metrics without a valid prompt are omitted.
    scores: of P * num_samples completions, ordered by prompt.
    """
    rewards_PG = scores.rewards.reshape(-1, settings.num_samples)
    correct_PG = np.where(np.isnan(rewards_PG), np.nan, rewards_PG >= settings.correct_at)
    by_prompt = {"mean": prompt_means(rewards_PG)}
    by_prompt |= {f"pass@{k}": pass_at_k(correct_PG, k) for k in settings.pass_at}
    if len(scores.by_name) > 1:
        by_prompt |= {f"mean/{name}": prompt_means(values.reshape(rewards_PG.shape)) for name, values in scores.by_name.items()}
    counted = {name: values_P[~np.isnan(values_P)] for name, values_P in by_prompt.items()}
    return {name: float(values.mean()) for name, values in counted.items() if len(values)}
