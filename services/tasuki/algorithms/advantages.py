"""Advantages from rewards, with a reward baseline or a critic's values; the KL divergence to the reference as part of the reward.

Shape suffixes: P prompts, G completions of each; S samples; N completion tokens, concatenated by sample. Arithmetic is in float64.
A non-finite reward marks a failure: its sample is excluded from every mean and deviation, and gets advantage 0.
Every function raises SettingError, a ValueError, naming an argument with a mismatched shape: nothing is broadcast.
"""

import math
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from tasuki.algorithms.aggregation import Floats, Integers, check_shape, from_rows, sample_ids, to_rows
from tasuki.algorithms.loss_types import KlEstimator
from tasuki.algorithms.setting import KL_HORIZON, MAX_KL_ERROR, SettingError, Std

# Prevents large advantages in a group whose rewards differ only by rounding.
_STD_FLOOR = 1e-6
_VARIANCE_FLOOR = 1e-8
# As in the loss: larger values carry no information.
_MAX_LOG_RATIO = 20.0


def group_mean(rewards_PG: Floats, *, std: Std = "none") -> NDArray[np.float32]:
    """[P, G]: reward minus its group's mean, over the group's standard deviation plus 1e-6 unless `std` is "none".

    rewards_PG: [P, G]. "sample" divides by the number of rewards minus one, "population" by their number. Exactly 0 for a single reward
    or equal rewards.
    Source: GRPO, DeepSeekMath (arXiv:2402.03300) sec. 4.1.2; "none" is Dr. GRPO's (arXiv:2503.20783) sec. 3.2.
    """
    if std not in get_args(Std):
        raise SettingError("std", f"is {std!r}; must be one of {', '.join(get_args(Std))}")
    centered_PG = _group_centered(rewards_PG)
    if std != "none":
        degrees_P1 = np.maximum(np.isfinite(rewards_PG).sum(axis=1, keepdims=True) - (std == "sample"), 1)
        centered_PG /= np.sqrt(np.square(centered_PG).sum(axis=1, keepdims=True) / degrees_P1) + _STD_FLOOR
    return centered_PG.astype(np.float32)


def leave_one_out(rewards_PG: Floats) -> NDArray[np.float32]:
    """[P, G]: reward minus the mean of the group's other rewards. Exactly 0 for a single reward or equal rewards.

    rewards_PG: [P, G].
    Source: RLOO (arXiv:2402.14740).
    """
    centered_PG = _group_centered(rewards_PG)
    num_valid_P1 = np.isfinite(rewards_PG).sum(axis=1, keepdims=True)
    return (centered_PG * (num_valid_P1 / np.maximum(num_valid_P1 - 1, 1))).astype(np.float32)


def group_baseline_whitened(rewards_PG: Floats, *, num_counted_PG: Integers | None = None) -> NDArray[np.float32]:
    """[P, G]: reward minus its group's mean, whitened over the whole batch.

    rewards_PG: [P, G]. num_counted_PG: [P, G] counted tokens of each sample, its weight in the batch's mean and variance; None weighs
    all samples equally.
    Source: REINFORCE++-baseline (arXiv:2501.03262).
    """
    centered_PG = _group_centered(rewards_PG)
    weights_PG = np.ones(centered_PG.shape) if num_counted_PG is None else np.asarray(num_counted_PG, dtype=np.float64)
    check_shape(weights_PG, centered_PG.shape, name="num_counted_PG")
    weights_PG = np.where(np.isfinite(rewards_PG), weights_PG, 0.0)
    return _whitened(centered_PG, weights_PG).astype(np.float32)


def globally_whitened(
    rewards_N: Floats, num_completion_S: Integers, *, loss_mask_N: Floats | None = None, discount: float = 1.0
) -> NDArray[np.float32]:
    """[N]: the discounted sum of rewards from each token on, whitened over the batch's counted tokens; 0 elsewhere.

    rewards_N: [N], for example from `token_rewards`; num_completion_S: [S]. Masked tokens are not steps: they discount
    nothing. A sample with a NaN reward is excluded.
    Source: REINFORCE++ (arXiv:2501.03262).
    """
    mask_N = np.ones(len(rewards_N)) if loss_mask_N is None else np.asarray(loss_mask_N, dtype=np.float64)
    _check_tokens(num_completion_S, rewards_N=rewards_N, loss_mask_N=mask_N)
    rewards_N, mask_N = _leave_out_failed(rewards_N, mask_N, num_completion_S)
    rewards_ST, mask_ST = to_rows(rewards_N, num_completion_S), to_rows(mask_N, num_completion_S)
    returns_ST = np.zeros_like(rewards_ST)
    running_S = np.zeros(len(num_completion_S))
    for t in reversed(range(rewards_ST.shape[1])):
        running_S = rewards_ST[:, t] + np.where(mask_ST[:, t] > 0.0, discount, 1.0) * running_S
        returns_ST[:, t] = running_S
    return whitened(from_rows(returns_ST, num_completion_S), loss_mask_N=mask_N)


def greedy_baseline(rewards_PG: Floats, greedy_rewards_P: Floats) -> NDArray[np.float32]:
    """[P, G]: reward minus that of the prompt's greedy completion; 0 in a group whose greedy reward failed.

    rewards_PG: [P, G]; greedy_rewards_P: [P].
    Source: ReMax (arXiv:2310.10505).
    """
    rewards_PG = _groups(rewards_PG)
    check_shape(greedy_rewards_P, rewards_PG.shape[:1], name="greedy_rewards_P")
    return np.nan_to_num(rewards_PG - np.asarray(greedy_rewards_P)[:, None]).astype(np.float32)


def batch_baseline(rewards_S: Floats, *, std: Std = "none") -> NDArray[np.float32]:
    """[S]: `group_mean` with the whole batch as one group, for one completion of each prompt.

    Source: REINFORCE with a baseline, Williams (1992); batch statistics as in REINFORCE++ (arXiv:2501.03262).
    """
    check_shape(rewards_S, (np.size(rewards_S),), name="rewards_S")
    return group_mean(np.asarray(rewards_S)[None], std=std)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningBaseline:
    """Exponential moving mean of past batches' rewards: the baseline for one completion per prompt. Save and restore its fields.

    Source: REINFORCE with a reinforcement-comparison baseline, Williams (1992); the decay as in SPIRAL (arXiv:2506.24119).
    """

    decay: float = 0.95
    """Factor on a batch's weight when the next one arrives."""
    total: float = 0.0
    weight: float = 0.0
    """0 before the first batch."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay < 1.0:
            raise SettingError("decay", f"is {self.decay}; must be from 0 to less than 1")

    def advantages(self, rewards_S: Floats) -> NDArray[np.float32]:
        """[S]: reward minus the mean of past batches, or of this batch if there are none."""
        check_shape(rewards_S, (np.size(rewards_S),), name="rewards_S")
        if self.weight == 0.0:
            return batch_baseline(rewards_S)
        return np.nan_to_num(np.asarray(rewards_S, dtype=np.float64) - self.total / self.weight).astype(np.float32)

    def updated(self, rewards_S: Floats) -> "RunningBaseline":
        """The baseline after this batch, for the next one."""
        valid = np.asarray(rewards_S, dtype=np.float64)[np.isfinite(rewards_S)]
        if len(valid) == 0:
            return self
        total = self.decay * self.total + (1.0 - self.decay) * float(valid.mean())
        return RunningBaseline(decay=self.decay, total=total, weight=self.decay * self.weight + 1.0 - self.decay)


def gae(
    rewards_N: Floats,
    values_N: Floats,
    num_completion_S: Integers,
    *,
    discount: float,
    lam: float,
    loss_mask_N: Floats | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Generalized advantages [N], not whitened (see `whitened`), and returns [N]: advantages plus values.

    rewards_N: [N], the reward of each token, as from `token_rewards`; values_N: [N], the critic's value of the state in which
    the token was chosen; the state after the last token has value 0. num_completion_S: [S].
    Masked tokens are not steps: advantages skip them, and their own are 0. A sample with a NaN reward gets advantages 0 and its values
    as returns.
    Source: GAE (arXiv:1506.02438) eq. 16.
    """
    mask_N = np.ones(len(rewards_N)) if loss_mask_N is None else np.asarray(loss_mask_N, dtype=np.float64)
    values_N = np.asarray(values_N, dtype=np.float64)
    _check_tokens(num_completion_S, rewards_N=rewards_N, values_N=values_N, loss_mask_N=mask_N)
    rewards_N, mask_N = _leave_out_failed(rewards_N, mask_N, num_completion_S)
    rewards_ST, values_ST, mask_ST = (to_rows(x_N, num_completion_S) for x_N in (rewards_N, values_N, mask_N))
    advantages_ST = np.zeros_like(rewards_ST)
    # `passed_S` accumulates rewards of masked tokens for the preceding counted token.
    advantage_S, next_value_S, passed_S = (np.zeros(len(num_completion_S)) for _ in range(3))
    for t in reversed(range(rewards_ST.shape[1])):
        is_counted_S = mask_ST[:, t] > 0.0
        passed_S = passed_S + rewards_ST[:, t]
        delta_S = passed_S + discount * next_value_S - values_ST[:, t]
        advantage_S = np.where(is_counted_S, delta_S + discount * lam * advantage_S, advantage_S)
        next_value_S = np.where(is_counted_S, values_ST[:, t], next_value_S)
        passed_S = np.where(is_counted_S, 0.0, passed_S)
        advantages_ST[:, t] = np.where(is_counted_S, advantage_S, 0.0)
    advantages_N = from_rows(advantages_ST, num_completion_S)
    return advantages_N.astype(np.float32), (advantages_N + values_N).astype(np.float32)


def explained_variance(values_N: Floats, returns_N: Floats, *, loss_mask_N: Floats | None = None) -> float:
    """1 - Var(returns - values) / Var(returns) over counted tokens: 1 for a perfect critic, 0 for a constant one.

    NaN if the returns do not vary. Values and returns: [N].
    """
    is_counted_N = np.ones(len(values_N), dtype=bool) if loss_mask_N is None else np.asarray(loss_mask_N) > 0.0
    for name, x_N in (("returns_N", returns_N), ("loss_mask_N", is_counted_N)):
        check_shape(x_N, (np.size(values_N),), name=name)
    returns_N = np.asarray(returns_N, dtype=np.float64)[is_counted_N]
    errors_N = returns_N - np.asarray(values_N, dtype=np.float64)[is_counted_N]
    if len(returns_N) == 0 or np.ptp(returns_N) == 0.0:
        return math.nan
    return float(1.0 - errors_N.var() / returns_N.var())


def whitened(advantages_N: Floats, *, loss_mask_N: Floats) -> NDArray[np.float32]:
    """[N]: normalized to mean 0 and variance 1 over counted tokens; 0 elsewhere, and everywhere if these are equal.

    The variance divides by the number of counted tokens minus one.
    Source: advantage normalization, "What matters in on-policy reinforcement learning?" (arXiv:2006.05990).
    """
    check_shape(advantages_N, (np.size(advantages_N),), name="advantages_N")
    check_shape(loss_mask_N, np.shape(advantages_N), name="loss_mask_N")
    return _whitened(np.asarray(advantages_N, dtype=np.float64), np.asarray(loss_mask_N, dtype=np.float64)).astype(np.float32)


def has_signal(rewards_PG: Floats) -> NDArray[np.bool_]:
    """[P]: False for a group whose valid rewards are equal: it has no gradient and may be left out.

    Source: the filter of DAPO's dynamic sampling (arXiv:2503.14476) sec. 3.2.
    """
    rewards_PG = _groups(rewards_PG)
    is_valid_PG = np.isfinite(rewards_PG)
    lowest_P = np.where(is_valid_PG, rewards_PG, np.inf).min(axis=1, initial=np.inf)
    return np.where(is_valid_PG, rewards_PG, -np.inf).max(axis=1, initial=-np.inf) > lowest_P


def _groups(rewards_PG: Floats) -> NDArray[np.float64]:
    """Converts to [P, G] float64. Raises SettingError for another number of axes."""
    rewards_PG = np.asarray(rewards_PG, dtype=np.float64)
    if rewards_PG.ndim != 2:
        raise SettingError("rewards_PG", f"has shape {list(rewards_PG.shape)}; give one row for each prompt")
    return rewards_PG


def _check_tokens(num_completion_S: Integers, **columns_N: Floats) -> None:
    """Raises SettingError for a column without exactly one entry per token."""
    for name, x_N in columns_N.items():
        check_shape(x_N, (int(np.sum(num_completion_S)),), name=name)


def _leave_out_failed(
    rewards_N: Floats, loss_mask_N: Floats, num_completion_S: Integers
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rewards [N] and mask [N], both 0 for samples with a NaN reward."""
    ids_N = sample_ids(num_completion_S)
    has_failed_S = np.bincount(ids_N, weights=~np.isfinite(rewards_N), minlength=len(num_completion_S)) > 0
    return np.where(has_failed_S[ids_N], 0.0, rewards_N), np.where(has_failed_S[ids_N], 0.0, loss_mask_N)


def _group_centered(rewards_PG: Floats) -> NDArray[np.float64]:
    """[P, G]: reward minus its group's mean; exactly 0 for a failed reward and in a group without signal.

    The mean of equal values may differ from that value by rounding, so has_signal decides.
    """
    rewards_PG = _groups(rewards_PG)
    is_valid_PG = np.isfinite(rewards_PG)
    num_valid_P1 = np.maximum(is_valid_PG.sum(axis=1, keepdims=True), 1)
    centered_PG = rewards_PG - np.where(is_valid_PG, rewards_PG, 0.0).sum(axis=1, keepdims=True) / num_valid_P1
    return np.where(is_valid_PG & has_signal(rewards_PG)[:, None], centered_PG, 0.0)


def _whitened(x: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Exactly 0 if all counted values are equal, whose mean may differ from them by rounding."""
    total = weights.sum()
    if total == 0.0 or np.ptp(x[weights > 0.0]) == 0.0:
        return np.zeros_like(x)
    centered = np.where(weights > 0.0, x - (x * weights).sum() / total, 0.0)
    variance = (np.square(centered) * weights).sum() / max(total - 1.0, 1.0)
    return centered / np.sqrt(variance + _VARIANCE_FLOOR)


def soft_overlong_penalty(
    num_completion_S: NDArray[np.integer], *, max_completion_tokens: int, buffer_tokens: int
) -> NDArray[np.float32]:
    """[S]: added to the reward: 0 up to the buffer, then falling to -1 at `max_completion_tokens`, and -1 beyond.

    num_completion_S: [S] tokens of each completion; 0 < buffer_tokens <= max_completion_tokens.
    Source: DAPO (arXiv:2503.14476) eq. 13, with L_cache = buffer_tokens.
    """
    assert 0 < buffer_tokens <= max_completion_tokens
    excess_S = np.asarray(num_completion_S, dtype=np.float64) - (max_completion_tokens - buffer_tokens)
    return (0.0 - np.clip(excess_S / buffer_tokens, 0.0, 1.0)).astype(np.float32)


def kl_penalties(
    log_probs_N: Floats, ref_log_probs_N: Floats, *, estimator: KlEstimator = KlEstimator.K1
) -> NDArray[np.float64]:
    """[N]: estimate of KL(policy || reference) for each token. K3_STRAIGHT_THROUGH equals K3 here: in a reward only values matter.

    Source: Schulman (http://joschu.net/blog/kl-approx.html); k1 is the penalty of InstructGPT (arXiv:2203.02155) eq. 2.
    """
    check_shape(ref_log_probs_N, np.shape(log_probs_N), name="ref_log_probs_N")
    log_ratio_N = np.asarray(ref_log_probs_N, dtype=np.float64) - np.asarray(log_probs_N, dtype=np.float64)
    log_ratio_N = np.clip(log_ratio_N, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    match estimator:
        case KlEstimator.K1:
            return -log_ratio_N
        case KlEstimator.K2:
            return 0.5 * np.square(log_ratio_N)
        case KlEstimator.K3 | KlEstimator.K3_STRAIGHT_THROUGH:
            return np.expm1(log_ratio_N) - log_ratio_N


def token_rewards(
    rewards_S: Floats,
    penalties_N: Floats,
    num_completion_S: Integers,
    *,
    coef: float,
    loss_mask_N: Floats | None = None,
) -> NDArray[np.float32]:
    """[N]: minus `coef` times the penalty of each counted token, plus the sample's reward on its last counted token.

    rewards_S: [S], NaN for failed ones, which makes the last token's reward NaN; penalties_N: [N] from `kl_penalties`;
    num_completion_S: [S]. A sample without a counted token has no reward.
    Source: Ziegler et al. (arXiv:1909.08593) eq. 2.
    """
    is_counted_N = np.ones(len(penalties_N), dtype=bool) if loss_mask_N is None else np.asarray(loss_mask_N) > 0.0
    check_shape(rewards_S, (len(num_completion_S),), name="rewards_S")
    for name, x_N in (("penalties_N", penalties_N), ("loss_mask_N", is_counted_N)):
        check_shape(x_N, (int(np.sum(num_completion_S)),), name=name)
    rewards_N = np.where(is_counted_N, -coef * np.asarray(penalties_N, dtype=np.float64), 0.0)
    ids_N = sample_ids(num_completion_S)
    places = np.flatnonzero(is_counted_N)
    last_places = places[np.append(ids_N[places][1:] != ids_N[places][:-1], True)] if len(places) else places
    rewards_N[last_places] += np.asarray(rewards_S, dtype=np.float64)[ids_N[last_places]]
    return rewards_N.astype(np.float32)


def adapted_coef(coef: float, kl: float, *, target: float, num_samples: int) -> float:
    """The KL coefficient after a batch of `num_samples` with this mean KL divergence, in units of the target.

    Source: Ziegler et al. (arXiv:1909.08593) sec. 2.2; the horizon as in their code.
    """
    error = min(max(kl / target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
    return coef * (1.0 + error * num_samples / KL_HORIZON)
