"""Settings of advantages, and constraints between a loop's settings. Shared by the client's loop and the configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

from tasuki.algorithms.effects import check_advantage_effects, check_loss_effects
from tasuki.algorithms.loss import CriticLoss
from tasuki.algorithms.loss_types import KlEstimator, LossConfig, OldPolicy
from tasuki.algorithms.setting import SettingError, check_numbers, member

Std = Literal["none", "sample", "population"]
MAX_KL_ERROR = 0.2
"""Bound on a step's relative error for adapting kl_coef, which changes by at most this times samples / horizon."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """How to compute advantages. Raises SettingError naming a field that is out of range or has no effect next to the others."""

    estimator: Estimator = Estimator.GROUP_MEAN
    std: Std = "sample"
    """Standard deviation by which group_mean and batch_baseline divide."""
    discount: float = 1.0
    """Above 0, at most 1."""
    lam: float = 1.0
    """GAE's lambda, from 0 to 1."""
    whiten: bool = True
    """Whether to whiten GAE's advantages over the batch."""
    kl_coef: float = 0.0
    """Weight of the KL divergence to the reference within the reward."""
    kl_estimator: KlEstimator = KlEstimator.K1
    kl_target: float | None = None
    """Target KL divergence in nats per sequence, towards which kl_coef adapts; by default kl_coef is fixed."""
    kl_horizon: float = 10_000.0
    """Number of samples over which an error of 20 % changes kl_coef by 20 %."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "estimator", member(Estimator, self.estimator, field="estimator"))
        object.__setattr__(self, "kl_estimator", member(KlEstimator, self.kl_estimator, field="kl_estimator"))
        if self.std not in get_args(Std):
            raise SettingError("std", f"is {self.std!r}; must be one of {', '.join(get_args(Std))}")
        check_numbers(self)
        for name, is_allowed, allowed in (
            ("discount", 0.0 < self.discount <= 1.0, "greater than 0 and at most 1"),
            ("lam", 0.0 <= self.lam <= 1.0, "from 0 to 1"),
            ("kl_coef", 0.0 <= self.kl_coef < math.inf, "0 or greater"),
            ("kl_target", self.kl_target is None or 0.0 < self.kl_target < math.inf, "greater than 0"),
            ("kl_horizon", 0.0 < self.kl_horizon < math.inf, "greater than 0"),
        ):
            if not is_allowed:
                raise SettingError(name, f"is {getattr(self, name)}; must be {allowed}")
        if self.kl_target is not None and not self.kl_coef:
            raise SettingError("kl_target", "needs a kl_coef above 0 to start from")
        check_advantage_effects(self)


def check_groups(estimator: Estimator, *, group_size: int, num_groups: int, max_batches: int) -> None:
    """Raises SettingError if groups of one completion, or a step of one group, have no gradient. num_groups: of a step."""
    if group_size > 1:
        return
    if estimator is Estimator.BATCH_BASELINE and num_groups == 1:
        raise SettingError(
            "group_size", 'of 1 with one prompt a step teaches nothing with advantages.estimator = "batch_baseline"'
        )
    if estimator.needs_groups:
        others = ", ".join(f'"{other}"' for other in Estimator if not other.needs_groups)
        raise SettingError("group_size", f'of 1 teaches nothing with advantages.estimator = "{estimator}"; use one of {others}')
    if max_batches > 1:
        raise SettingError("max_batches", "above 1 keeps groups that differ, which a group of one never does")


def check_kl_horizon(advantages: AdvantageSettings, *, prompts_per_step: int, group_size: int) -> None:
    """Raises SettingError for a horizon so short that one step could take kl_coef to 0 or below."""
    num_samples = prompts_per_step * group_size
    least = MAX_KL_ERROR * num_samples
    if advantages.kl_target is not None and advantages.kl_horizon <= least:
        problem = (
            f"is {advantages.kl_horizon:g}, but a step of prompts_per_step * group_size = {num_samples} samples needs more than "
            f"{least:g}: kl_coef would fall to 0 or below"
        )
        raise SettingError("advantages.kl_horizon", problem)


def check_loss(loss: LossConfig, *, num_updates: int) -> None:
    """Raises SettingError for a loss that does not use rewards, has ineffective settings, or whose ratio would be 1 in every update of a
    step.

    num_updates: optimizer steps on the samples of a step.
    """
    if not loss.has_advantages:
        raise SettingError("loss", f"{loss.name} does not learn from rewards")
    check_loss_effects(loss)
    if num_updates > 1 and loss.has_ratio and loss.old_policy is OldPolicy.CURRENT:
        raise SettingError(
            "old_policy", f'"current" is for one optimizer step a step, and there are {num_updates}; use "given"'
        )


def check_critic(estimator: Estimator, *, value_loss: LossConfig | None, warmup_steps: int) -> None:
    """Raises SettingError if an estimator that needs a critic has no value loss, or another one has."""
    if warmup_steps and value_loss is None:
        raise SettingError("critic_warmup_steps", 'needs a critic: use the estimator "gae" and a value_loss')
    if (value_loss is not None) is not (estimator is Estimator.GAE):
        problem = 'is needed by the estimator "gae"' if value_loss is None else f'is for "gae"; "{estimator}" has no returns'
        raise SettingError("value_loss", problem)
    if value_loss is not None and not isinstance(value_loss.loss, CriticLoss):
        raise SettingError("value_loss", f"is {value_loss.name}; must be a loss of the critic")


def check_overlong(overlong_tokens: int | None, *, max_new_tokens: int | None) -> None:
    """Raises SettingError if the buffer is longer than max_new_tokens, or that is not set."""
    if overlong_tokens is None:
        return
    if max_new_tokens is None:
        raise SettingError("overlong_tokens", "needs sampling.max_new_tokens")
    if not 0 < overlong_tokens <= max_new_tokens:
        raise SettingError("overlong_tokens", f"is {overlong_tokens}; must be from 1 to max_new_tokens = {max_new_tokens}")
