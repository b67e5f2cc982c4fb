"""Settings that others leave without effect: refused by name, by the client's loops and the configuration alike.

A coefficient or a count of 0 switches something off. The settings of that stay, so that it can be switched on again by one key.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tasuki.algorithms.loss_types import Correction, LossConfig, OldPolicy, SettingError

if TYPE_CHECKING:
    from tasuki.algorithms.estimator import AdvantageSettings

Row = tuple[str, object, object, bool, str]
"""A setting's name, its value, its default, whether it has an effect, and what would give it one."""


def check_effects(rows: Iterable[Row]) -> None:
    """Raises SettingError naming the first setting that is not its default and has no effect."""
    for name, value, default, has_effect, needed in rows:
        if value != default and not has_effect:
            raise SettingError(name, f"is {value!s}, which has no effect: {needed}, or leave it out")


def check_advantage_effects(settings: AdvantageSettings) -> None:
    """Raises SettingError naming a setting that the estimator does not read."""
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
    """Raises SettingError naming a setting of a policy's loss that the others leave unread."""
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


def check_eval_sampling(
    *, temperature: float, top_p: float | None, top_k: int | None, correct_at: float, pass_at: object
) -> None:
    """Raises SettingError naming a setting of an evaluation that greedy sampling, or no pass@k, leaves unread."""
    samples, needed = temperature > 0.0, "greedy sampling takes the likeliest token; raise temperature above 0"
    check_effects(
        (
            ("top_p", 1.0 if top_p is None else top_p, 1.0, samples, needed),
            ("top_k", -1 if top_k is None else top_k, -1, samples, needed),
            ("correct_at", correct_at, 1.0, bool(pass_at), "it is for pass@k; name each k in pass_at"),
        )
    )


def check_evaluation(
    *, has_prompts: bool, needed: str, eval_every: int | None, stop_at_eval_score: float | None = None, evaluation: bool = False
) -> None:
    """Raises SettingError naming a setting of evaluations where nothing is held out. evaluation: whether its own settings are given."""
    check_effects(
        (
            ("eval_every", eval_every, None, has_prompts, needed),
            ("stop_at_eval_score", stop_at_eval_score, None, has_prompts, needed),
            ("eval", evaluation, False, has_prompts, needed),
        )
    )
