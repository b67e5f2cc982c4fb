"""Advantages, loss masks and mini-batches of a batch. Shape suffixes: P prompts, G completions of each, S samples, N tokens."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tasuki.algorithms import advantages
from tasuki.algorithms.advantages import RunningBaseline, adapted_coef, kl_penalties, token_rewards
from tasuki.algorithms.setting import Estimator
from tasuki.client.turns import TurnSample
from tasuki.client.types import FinishReason, Sample, TrainingSample
from tasuki.config.train_schema import AdvantageConfig
from tasuki.wire.errors import InvalidArgument


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The completions of one prompt and their rewards."""

    prompt_token_ids: Sequence[int]
    samples: Sequence[Sample]
    """[G]"""
    rewards: NDArray[np.float32]
    """[G]; NaN for excluded samples."""
    greedy_reward: float | None = None
    """Reward of the prompt's greedy completion, for Estimator.GREEDY_BASELINE."""
    branches: Sequence[Sequence[TrainingSample]] = ()
    """[G], the training samples of each episode; empty for completions of one turn."""

    def training_samples(self) -> list[list[TrainingSample]]:
        """[G], of each completion or episode, without advantages."""
        if self.branches:
            return [list(each) for each in self.branches]
        return [[TrainingSample.of(sample, prompt_token_ids=self.prompt_token_ids)] for sample in self.samples]

    def differs(self) -> bool:
        """Whether the rewards, or those of a turn, differ. Equal rewards give no gradient."""
        returns_TG = _returns_TG([next(iter(each), None) for each in self.branches])
        rows = [self.rewards[np.newaxis], *([returns_TG] if len(returns_TG) else [])]
        return bool(np.any(advantages.has_signal(np.concatenate(rows))))


@dataclass(frozen=True, slots=True)
class EstimatorState:
    """Numbers that one step's estimate passes to the next. Saved with the step."""

    kl_coef: float | None = None
    """KL coefficient as adapted to kl_target; None for the configured one."""
    baseline: RunningBaseline = field(default_factory=RunningBaseline)

    def numbers(self) -> dict[str, float]:
        numbers = {"baseline_total": self.baseline.total, "baseline_weight": self.baseline.weight}
        return numbers if self.kl_coef is None else {"kl_coef": self.kl_coef, **numbers}

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> "EstimatorState":
        """Reads the state from saved numbers; without them, the state of a first step."""
        baseline = RunningBaseline(total=numbers.get("baseline_total", 0.0), weight=numbers.get("baseline_weight", 0.0))
        return cls(numbers.get("kl_coef"), baseline)


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    samples: list[TrainingSample]
    """The samples with advantages and, if there is a critic, returns."""
    state: EstimatorState
    metrics: dict[str, float]


def estimate_advantages(
    samples: Sequence[TrainingSample],
    *,
    rewards_PG: NDArray[np.floating],
    places: Sequence[int],
    greedy_rewards_P: NDArray[np.floating] | None,
    settings: AdvantageConfig,
    state: EstimatorState,
) -> Estimate:
    """samples: [S], with ref_log_probs if kl_coef is not 0 and values for GAE. places: index of each in the flattened rewards_PG;
    branches of an episode have the same.

    greedy_rewards_P: for GREEDY_BASELINE. NaN marks a failed reward.
    """
    tokens = _Tokens(samples)
    metrics: dict[str, float] = {}
    penalties_N = np.zeros(tokens.num_tokens)
    kl_coef = settings.kl_coef if state.kl_coef is None else state.kl_coef
    if settings.kl_coef:
        log_probs_N = tokens.column("old_log_probs") if len(samples[0].old_log_probs) else tokens.column("rollout_log_probs")
        penalties_N = kl_penalties(log_probs_N, tokens.column("ref_log_probs"))
        kl_S = tokens.sums(penalties_N * tokens.mask_N)
        metrics |= {"reward_kl": float(kl_S.mean()), "reward_kl_coef": kl_coef}
    shaped_PG = np.array(rewards_PG, dtype=np.float64)
    if settings.estimator in (Estimator.GAE, Estimator.GLOBALLY_WHITENED):
        rewards_S = shaped_PG.reshape(-1)[list(places)]
        rewards_N = token_rewards(rewards_S, penalties_N, tokens.num_completion_S, coef=kl_coef, loss_mask_N=tokens.mask_N)
        estimated, figures = _by_token(samples, tokens, rewards_N, settings=settings)
        metrics |= figures
    else:
        np.subtract.at(shaped_PG.reshape(-1), list(places), kl_coef * tokens.sums(penalties_N * tokens.mask_N))
        advantages_PG = _by_sample(shaped_PG, tokens, places, greedy_rewards_P, settings=settings, state=state)
        estimated = [
            replace(sample, advantages=float(advantages_PG.reshape(-1)[place]))
            for sample, place in zip(samples, places, strict=True)
        ]
    if any(isinstance(sample, TurnSample) for sample in estimated):
        estimated = _by_turn(estimated, places, rewards_PG.shape, settings=settings)
    coef = None
    if settings.kl_target is not None and "reward_kl" in metrics:
        coef = adapted_coef(kl_coef, metrics["reward_kl"], target=settings.kl_target, num_samples=len(samples))
    return Estimate(estimated, EstimatorState(coef, state.baseline.updated(shaped_PG.reshape(-1))), metrics)


def check_turn_rewards(settings: AdvantageConfig) -> None:
    """Raises InvalidArgument unless turns may have rewards of their own."""
    if settings.estimator not in (Estimator.GROUP_MEAN, Estimator.LEAVE_ONE_OUT) or settings.kl_coef:
        problem = 'policy.reward needs "group_mean" or "leave_one_out", and advantages.kl_coef = 0 (loss.kl_coef may be set)'
        raise InvalidArgument("train.advantages.estimator", problem)


def _by_turn(
    samples: Sequence[TrainingSample], places: Sequence[int], shape_PG: tuple[int, ...], *, settings: AdvantageConfig
) -> list[TrainingSample]:
    """Gives the tokens of each turn its own advantage: its return, estimated beside those of the same turn in its group."""
    check_turn_rewards(settings)
    of_episode: list[TrainingSample | None] = [None] * math.prod(shape_PG)
    for place, sample in zip(places, samples, strict=True):
        of_episode[place] = sample
    size, by_turn = shape_PG[1], list[NDArray[np.float32]]()
    for first in range(0, len(of_episode), size):
        returns_TG = _returns_TG(of_episode[first : first + size])
        is_mean = settings.estimator is Estimator.GROUP_MEAN
        estimated = advantages.group_mean(returns_TG, std=settings.std) if is_mean else advantages.leave_one_out(returns_TG)
        by_turn += list(np.vstack([estimated, np.zeros((1, size), np.float32)]).T)  # the last row: tokens of no turn, -1
    return [
        replace(sample, advantages=by_turn[place][sample.turns]) if isinstance(sample, TurnSample) else sample
        for sample, place in zip(samples, places, strict=True)
    ]


def _returns_TG(samples: Sequence[TrainingSample | None]) -> NDArray[np.float64]:
    """Returns of the turns of G episodes, of each of which a sample is given; NaN for turns that an episode has not taken."""
    returns = [sample.turn_returns if isinstance(sample, TurnSample) else () for sample in samples]
    rows_TG = np.full((max(map(len, returns), default=0), len(returns)), np.nan)
    for place, each in enumerate(returns):
        rows_TG[: len(each), place] = each
    return rows_TG


def has_advantages(samples: Sequence[TrainingSample]) -> bool:
    """Whether any counted token has a non-zero advantage."""
    tokens = _Tokens(samples)
    spread = [np.broadcast_to(sample.advantages, len(sample.completion_token_ids)) for sample in samples]
    return bool(np.any(np.concatenate(spread)[tokens.mask_N > 0.0]))


def training_samples(groups: Sequence[Group], *, mask_truncated: bool) -> tuple[list[TrainingSample], list[int]]:
    """Builds training samples without advantages; returns them with their indices among all completions.

    Empty completions and those whose reward failed are left out. mask_truncated: whether the loss counts no token of samples that
    ended by LENGTH, which still count in their group's baseline: the overlong filtering of DAPO (arXiv:2503.14476) sec. 3.4.
    """
    generated = [sample for group in groups for sample in group.samples]
    made = [samples for group in groups for samples in group.training_samples()]
    has_reward = np.isfinite(np.concatenate([group.rewards for group in groups]))
    kept = [place for place, sample in enumerate(generated) if len(sample.token_ids) and has_reward[place]]
    samples, places = [sample for place in kept for sample in made[place]], [place for place in kept for _ in made[place]]
    for index, (sample, place) in enumerate(zip(samples, places, strict=True)):
        if mask_truncated and generated[place].finish_reason is FinishReason.LENGTH:
            samples[index] = replace(sample, loss_mask=np.zeros(len(sample.completion_token_ids), dtype=np.float32))
    return samples, places


def has_loss_tokens(samples: Sequence[TrainingSample]) -> bool:
    """Whether the loss counts at least one token of the samples."""
    return any(not len(sample.loss_mask) or bool(np.any(sample.loss_mask)) for sample in samples)


def mini_batches(
    samples: Sequence[TrainingSample], *, num_parts: int, seeds: Sequence[Sequence[int]]
) -> Iterator[list[TrainingSample]]:
    """Cuts the samples into parts, once for each seed, shuffled unless one part holds all. Leaves out parts without a counted token."""
    num_parts = min(num_parts, len(samples))
    for seed in seeds if num_parts else ():
        order = np.arange(len(samples))
        if num_parts > 1:
            np.random.default_rng(seed).shuffle(order)
        for part in np.array_split(order, num_parts):
            mini_batch = [samples[index] for index in part]
            if has_loss_tokens(mini_batch):
                yield mini_batch


def _by_sample(
    rewards_PG: NDArray[np.floating],
    tokens: "_Tokens",
    places: Sequence[int],
    greedy_rewards_P: NDArray[np.floating] | None,
    *,
    settings: AdvantageConfig,
    state: EstimatorState,
) -> NDArray[np.float32]:
    match settings.estimator:
        case Estimator.GROUP_MEAN:
            return advantages.group_mean(rewards_PG, std=settings.std)
        case Estimator.LEAVE_ONE_OUT:
            return advantages.leave_one_out(rewards_PG)
        case Estimator.GROUP_BASELINE_WHITENED:
            counted = np.zeros(rewards_PG.size)
            np.add.at(counted, list(places), tokens.sums(tokens.mask_N))
            return advantages.group_baseline_whitened(rewards_PG, num_counted_PG=counted.reshape(rewards_PG.shape).astype(int))
        case Estimator.GREEDY_BASELINE:
            assert greedy_rewards_P is not None
            return advantages.greedy_baseline(rewards_PG, greedy_rewards_P)
        case Estimator.BATCH_BASELINE:
            return advantages.batch_baseline(rewards_PG.reshape(-1), std=settings.std)
        case Estimator.RUNNING_BASELINE:
            return state.baseline.advantages(rewards_PG.reshape(-1))
        case _:
            raise AssertionError(f"{settings.estimator} gives advantages by token")


def _by_token(
    samples: Sequence[TrainingSample], tokens: "_Tokens", rewards_N: NDArray[np.floating], *, settings: AdvantageConfig
) -> tuple[list[TrainingSample], dict[str, float]]:
    lengths_S = tokens.num_completion_S
    if settings.estimator is Estimator.GLOBALLY_WHITENED:
        advantages_N = advantages.globally_whitened(rewards_N, lengths_S, loss_mask_N=tokens.mask_N, discount=settings.discount)
        return [replace(sample, advantages=row) for sample, row in zip(samples, tokens.rows(advantages_N), strict=True)], {}
    values_N = tokens.column("values")
    advantages_N, returns_N = advantages.gae(
        rewards_N, values_N, lengths_S, discount=settings.discount, lam=settings.lam, loss_mask_N=tokens.mask_N
    )
    explained = advantages.explained_variance(values_N, returns_N, loss_mask_N=tokens.mask_N)
    if settings.whiten:
        advantages_N = advantages.whitened(advantages_N, loss_mask_N=tokens.mask_N)
    rows = zip(samples, tokens.rows(advantages_N), tokens.rows(returns_N), strict=True)
    estimated = [replace(sample, advantages=advantage, returns=returns) for sample, advantage, returns in rows]
    # Explained variance is undefined for constant returns.
    return estimated, {} if np.isnan(explained) else {"explained_variance": explained}


class _Tokens:
    """The completion tokens of all samples, concatenated."""

    def __init__(self, samples: Sequence[TrainingSample]) -> None:
        self._samples = samples
        self.num_completion_S = np.array([len(sample.completion_token_ids) for sample in samples], dtype=np.int64)
        self.num_tokens = int(self.num_completion_S.sum())
        masks = (sample.loss_mask if len(sample.loss_mask) else np.ones(len(sample.completion_token_ids)) for sample in samples)
        self.mask_N = np.concatenate([np.asarray(mask, dtype=np.float64) for mask in masks])

    def column(self, name: str) -> NDArray[np.float64]:
        return np.concatenate([np.asarray(getattr(sample, name), dtype=np.float64) for sample in self._samples])

    def rows(self, x_N: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        return np.split(x_N, np.cumsum(self.num_completion_S)[:-1])

    def sums(self, x_N: NDArray[np.floating]) -> NDArray[np.float64]:
        """[S]"""
        ids_N = np.repeat(np.arange(len(self.num_completion_S)), self.num_completion_S)
        return np.bincount(ids_N, weights=x_N, minlength=len(self.num_completion_S)).astype(np.float64, copy=False)
