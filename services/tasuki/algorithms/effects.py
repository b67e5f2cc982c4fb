"""Detects settings that have no effect next to others; used by the client's loops and the configuration.

A coefficient or count of 0 switches something off. Its settings may stay, so that one key switches it on again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from tasuki.algorithms.loss_types import Correction, LossConfig, OldPolicy
from tasuki.algorithms.setting import SettingError

if TYPE_CHECKING:
    from tasuki.algorithms.estimator import AdvantageSettings

Row = tuple[str, object, object, bool, str]
"""A setting's name, value and default, whether it has an effect, and what would give it one."""


def check_effects(rows: Iterable[Row]) -> None:
    """Raises SettingError naming the first setting that differs from its default but has no effect."""
    for name, value, default, has_effect, needed in rows:
        if value != default and not has_effect:
            raise SettingError(name, f"is {value!s}, which has no effect: {needed}, or remove it")


def check_advantage_effects(settings: AdvantageSettings) -> None:
    """Raises SettingError naming a setting that the estimator does not use."""
    estimator = str(settings.estimator)
    is_gae, divides = estimator == "gae", estimator in ("group_mean", "batch_baseline")
    is_by_token = estimator in ("gae", "globally_whitened")
    gae, dividers = 'it is for estimator = "gae"; use that', 'it is for estimator = "group_mean" or "batch_baseline"; use one'
    check_effects(
        (
            ("std", settings.std, "sample", divides or settings.std == "none", dividers),
            ("discount", settings.discount, 1.0, is_by_token, 'it is for estimator = "gae" or "globally_whitened"; use one'),
            ("lam", settings.lam, 1.0, is_gae, gae),
            ("whiten", settings.whiten, True, is_gae, gae),
            ("kl_horizon", settings.kl_horizon, 10_000.0, settings.kl_target is not None, "give a kl_target"),
        )
    )


def check_loss_effects(loss: LossConfig) -> None:
    """Raises SettingError naming a policy loss's setting that the others make ineffective."""
    correction = loss.correction
    truncates = loss.old_policy is not OldPolicy.ROLLOUT
    problem = 'a ratio to rollout\'s own log-probs needs no truncation; use another old_policy than "rollout"'
    token_truncation = None if correction.token_truncation is None else float(correction.token_truncation)
    usual = None if token_truncation is None else Correction().token_truncation
    check_effects(
        (
            ("loss.correction.token_truncation", token_truncation, usual, truncates, problem),
            ("loss.correction.sequence_truncation", correction.sequence_truncation, None, truncates, problem),
        )
    )


class EvalSampling(Protocol):
    """Settings of an evaluation, in the configuration or the client."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def correct_at(self) -> float: ...
    @property
    def pass_at(self) -> Sequence[int]: ...


def check_eval_sampling(given: EvalSampling) -> None:
    """Raises SettingError naming an evaluation setting that greedy sampling, or the lack of pass@k, makes ineffective."""
    samples, needed = given.temperature > 0.0, "greedy sampling takes the most likely token; raise temperature above 0"
    check_effects(
        (
            ("top_p", 1.0 if given.top_p is None else given.top_p, 1.0, samples, needed),
            ("top_k", -1 if given.top_k is None else given.top_k, -1, samples, needed),
            ("correct_at", given.correct_at, 1.0, bool(given.pass_at), "it is for pass@k; name each k in pass_at"),
        )
    )


def check_evaluation(
    *, has_prompts: bool, needed: str, eval_every: int | None, stop_at_eval_score: float | None = None, evaluation: bool = False
) -> None:
    """Raises SettingError naming an evaluation setting if there is no held-out data. evaluation: whether its settings are given."""
    check_effects(
        (
            ("eval_every", eval_every, None, has_prompts, needed),
            ("stop_at_eval_score", stop_at_eval_score, None, has_prompts, needed),
            ("eval", evaluation, False, has_prompts, needed),
        )
    )
