"""Refused settings of advantages and of the loop, in SDK and configuration alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasuki.algorithms.estimator import AdvantageSettings, Estimator
from tasuki.algorithms.loss_types import Correction, LossConfig, OldPolicy
from tasuki.algorithms.losses.gspo import GspoLoss
from tasuki.algorithms.losses.policy_gradient import PolicyGradientLoss
from tasuki.algorithms.losses.ppo import PpoLoss
from tasuki.algorithms.losses.sft import SftLoss
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.algorithms.setting import SettingError
from tasuki.client.rl_loop import Settings
from tasuki.client.types import SamplingParams

NAN, INF = float("nan"), float("inf")
VALUE_LOSS = LossConfig(loss=ValueLoss(), correction=Correction(token_truncation=None))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("estimator", value) for value in ("mean", None, 3)),
        *(("std", value) for value in ("foo", None, 1.0)),
        *(("discount", value) for value in (0.0, -1.0, 7, NAN, INF, "1")),
        *(("lam", value) for value in (-3, 1.5, NAN, None)),
        *(("kl_coef", value) for value in (-1, NAN, INF, "0.1", True)),
        ("kl_estimator", "k4"),
        *(("kl_target", value) for value in (0.0, -1.0, NAN, INF, 0.1)),  # the last one without kl_coef
        *(("kl_horizon", value) for value in (0.0, -1.0, NAN, INF)),
        *(("whiten", value) for value in ("no", 1, None)),
        # In range, but read only by another estimator, or only with a target.
        *(("std", "population"), ("discount", 0.9), ("lam", 0.9), ("whiten", False), ("kl_horizon", 10.0)),
    ],
)
def test_an_advantage_setting_out_of_range_is_named(field: str, value: object) -> None:
    settings: dict[str, Any] = {"estimator": "leave_one_out", field: value}
    with pytest.raises(SettingError) as raised:
        AdvantageSettings(**settings)
    assert raised.value.field == field


@pytest.mark.parametrize("own", [{"std": "none"}, {"kl_estimator": "k2", "kl_coef": 0.0}])
def test_settings_of_what_is_switched_off_are_allowed(own: dict[str, Any]) -> None:
    settings = AdvantageSettings(estimator=Estimator.LEAVE_ONE_OUT, **own)
    assert all(str(getattr(settings, name)) == str(value) for name, value in own.items())


def test_words_are_taken_for_members() -> None:
    words: dict[str, Any] = {"estimator": "gae", "kl_estimator": "k2", "kl_coef": 0.1}
    assert AdvantageSettings(**words).estimator is Estimator.GAE


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        num_steps=1, prompts_per_step=2, group_size=2, sampling=SamplingParams(max_new_tokens=8), output_dir=tmp_path
    )


GAE = AdvantageSettings(estimator=Estimator.GAE)
BATCH = AdvantageSettings(estimator=Estimator.BATCH_BASELINE)


@pytest.mark.parametrize(
    ("own", "field"),
    [
        *(({name: 0}, name) for name in ("num_steps", "prompts_per_step", "group_size", "num_epochs", "num_mini_batches", "max_batches")),
        ({"group_size": 1}, "group_size"),
        ({"group_size": 1, "advantages": BATCH, "max_batches": 2}, "max_batches"),
        ({"group_size": 1, "prompts_per_step": 1, "advantages": BATCH}, "group_size"),
        ({"num_steps": 1.5}, "num_steps"),
        ({"prompts_per_step": 2.5}, "prompts_per_step"),
        ({"save_every": -1}, "save_every"),
        ({"eval_every": 0}, "eval_every"),
        ({"seed": -1}, "seed"),
        ({"critic_warmup_steps": -1}, "critic_warmup_steps"),
        ({"mask_truncated": "no"}, "mask_truncated"),
        ({"loss": PpoLoss()}, "loss"),
        ({"value_loss": ValueLoss()}, "value_loss"),
        ({"sampling": None}, "sampling"),
        ({"advantages": None}, "advantages"),
        ({"advantages": AdvantageSettings(kl_coef=0.1, kl_target=1.0, kl_horizon=1e-3)}, "advantages.kl_horizon"),
        ({"num_epochs": 4}, "old_policy"),
        ({"num_mini_batches": 2, "loss": LossConfig(loss=GspoLoss())}, "old_policy"),
        ({"critic_warmup_steps": 2}, "critic_warmup_steps"),
        ({"advantages": GAE}, "value_loss"),
        ({"value_loss": VALUE_LOSS}, "value_loss"),
        ({"advantages": GAE, "value_loss": LossConfig()}, "value_loss"),
        ({"loss": LossConfig(loss=SftLoss())}, "loss"),
        ({"loss": LossConfig(old_policy=OldPolicy.ROLLOUT, correction=Correction(token_truncation=3))}, "loss.correction.token_truncation"),
        ({"loss": VALUE_LOSS}, "loss"),
        ({"overlong_tokens": 9}, "overlong_tokens"),
        ({"overlong_tokens": 0}, "overlong_tokens"),
        ({"overlong_tokens": 4, "sampling": SamplingParams()}, "overlong_tokens"),
    ],
)  # fmt: skip
def test_settings_of_a_loop_that_do_not_fit_are_named(settings: Settings, own: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingError) as raised:
        replace(settings, **own)
    assert raised.value.field == field


@pytest.mark.parametrize(
    "own",
    [
        {"group_size": 1, "advantages": BATCH},
        {"num_epochs": 4, "loss": LossConfig(old_policy=OldPolicy.GIVEN)},
        {"num_epochs": 4, "loss": LossConfig(old_policy=OldPolicy.ROLLOUT)},
        {"num_epochs": 4, "loss": LossConfig(loss=PolicyGradientLoss())},
        {"advantages": GAE, "value_loss": VALUE_LOSS, "critic_warmup_steps": 2},
        {"overlong_tokens": 8},
        {"loss": LossConfig(old_policy=OldPolicy.ROLLOUT, correction=Correction(token_truncation=None))},
    ],
)
def test_settings_of_a_loop_that_fit_are_taken(settings: Settings, own: dict[str, Any]) -> None:
    replace(settings, **own)
