"""Ranges of the losses' settings, and the fields that each loss needs."""

import math

import pytest

from tasuki.algorithms.loss import Loss
from tasuki.algorithms.loss_types import Aggregation, Correction, LossConfig, OldPolicy
from tasuki.algorithms.losses.cispo import CispoLoss
from tasuki.algorithms.losses.dppo import DppoLoss
from tasuki.algorithms.losses.gspo import GspoLoss
from tasuki.algorithms.losses.policy_gradient import PolicyGradientLoss
from tasuki.algorithms.losses.ppo import PpoLoss
from tasuki.algorithms.losses.sapo import SapoLoss
from tasuki.algorithms.losses.sft import SftLoss
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.algorithms.setting import SettingError

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("cls", "field", "value"),
    [
        *((cls, "clip_low", value) for cls in (PpoLoss, GspoLoss, CispoLoss) for value in (-0.1, 1.1, NAN)),
        *((cls, "clip_high", value) for cls in (PpoLoss, GspoLoss, CispoLoss) for value in (-0.1, 1e39, INF, NAN)),
        *((PpoLoss, "dual_clip", value) for value in (1.0, 0.5, INF, NAN)),
        *(
            (SapoLoss, name, value)
            for name in ("temperature_positive", "temperature_negative")
            for value in (0.0, -1.0, 1e39, INF, NAN)
        ),
        *((DppoLoss, name, value) for name, value in (("divergence", "js"), ("threshold", NAN), ("max_ratio", 0.5))),
        *((ValueLoss, "clip", value) for value in (0.0, -1.0, INF, NAN)),
        *((Correction, name, value) for name in ("token_truncation", "sequence_truncation") for value in (0.9, 1e39, INF, NAN)),
        *((Correction, "token_mask", value) for value in ((1.1, 2.0), (0.5, 0.9), (-0.1, 2.0), (0.5, INF), (NAN, 2.0), (0.5,))),
        *((Correction, "geometric_mask", value) for value in ((1.1, 2.0), (0.5, NAN))),
        *((LossConfig, "kl_coef", value) for value in (-0.1, 1e39, INF, NAN)),
        *((LossConfig, "entropy_coef", value) for value in (-1e39, INF, NAN)),
        *((LossConfig, "denominator", value) for value in (0.0, -1.0, 1e-300, 1e300, INF, NAN)),
        (LossConfig, "aggregation_length", 10),
        *(
            (LossConfig, name, value)
            for name in ("aggregation", "kl_estimator", "old_policy")
            for value in ("foo", 3, None, [])
        ),
        *((LossConfig, "loss", value) for value in ("ppo", None, PpoLoss, 1.0)),
        *((LossConfig, name, value) for name in ("kl_coef", "entropy_coef") for value in ("0.1", None, True)),
        (LossConfig, "aggregation_length", 2.5),
        (PpoLoss, "clip_high", "0.28"),
        (Correction, "token_mask", 2.0),
    ],
)
def test_a_setting_out_of_range_is_named(cls: type, field: str, value: object) -> None:
    with pytest.raises(SettingError) as caught:
        cls(**{field: value})
    assert caught.value.field == field
    assert str(caught.value) == f"{field}: {caught.value.problem}"


def test_token_and_sequence_truncation_exclude_each_other() -> None:
    with pytest.raises(SettingError, match="excludes token_truncation"):
        Correction(sequence_truncation=2.0)


@pytest.mark.parametrize("length", [None, 0])
def test_the_constant_needs_a_length(length: int | None) -> None:
    with pytest.raises(SettingError, match="aggregation_length"):
        LossConfig(aggregation=Aggregation.CONSTANT, aggregation_length=length)


@pytest.mark.parametrize("loss", [PolicyGradientLoss(), SftLoss(), ValueLoss()])
@pytest.mark.parametrize("old_policy", [OldPolicy.GIVEN, OldPolicy.ROLLOUT])
def test_a_loss_without_ratio_takes_no_old_policy(loss: Loss, old_policy: OldPolicy) -> None:
    with pytest.raises(SettingError, match="old_policy"):
        LossConfig(loss=loss, old_policy=old_policy)


@pytest.mark.parametrize("field", ["kl_coef", "entropy_coef"])
def test_a_value_loss_has_no_term_of_a_policy(field: str) -> None:
    with pytest.raises(SettingError, match=field):
        LossConfig(loss=ValueLoss(), **{field: 0.1})


@pytest.mark.parametrize(
    ("config", "required"),
    [
        (LossConfig(), {"advantages", "rollout_log_probs"}),
        (LossConfig(correction=Correction(token_truncation=None)), {"advantages"}),
        (LossConfig(old_policy=OldPolicy.GIVEN), {"advantages", "old_log_probs", "rollout_log_probs"}),
        (LossConfig(old_policy=OldPolicy.GIVEN, correction=Correction(token_truncation=None)), {"advantages", "old_log_probs"}),
        (LossConfig(old_policy=OldPolicy.ROLLOUT), {"advantages", "rollout_log_probs"}),
        (LossConfig(correction=Correction(token_truncation=None, token_mask=(0.5, 5))), {"advantages", "rollout_log_probs"}),
        (LossConfig(loss=PolicyGradientLoss(), kl_coef=0.1), {"advantages", "rollout_log_probs", "ref_log_probs"}),
        (LossConfig(loss=SftLoss()), set()),
        (LossConfig(loss=SftLoss(), kl_coef=0.1), {"ref_log_probs"}),
        (LossConfig(loss=ValueLoss(clip=0.2)), {"values", "returns"}),
        (LossConfig(loss=ValueLoss(clip=None)), {"returns"}),
    ],
)
def test_required_fields(config: LossConfig, required: set[str]) -> None:
    assert config.required_fields == required
