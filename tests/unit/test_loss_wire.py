"""Loss of a call on the wire: every setting arrives, and unset ones take their defaults."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.algorithms.loss_types import Aggregation, Correction, KlEstimator, LossConfig, OldPolicy
from tasuki.algorithms.losses import LOSSES
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.client.encode import loss_to_proto
from tasuki.trainer.wire import decode_loss
from tasuki.v1 import loss_pb2
from tests.refusal import refusing
from tests.unit.every_loss import ANY_LOSS

HIGH = st.floats(0.0, 10.0)
BOUNDS = st.none() | st.tuples(st.floats(0.0, 1.0), st.floats(1.0, 100.0))


@st.composite
def corrections(draw: st.DrawFn) -> Correction:
    bounds = {"token_mask": draw(BOUNDS), "geometric_mask": draw(BOUNDS)}
    token = draw(st.none() | st.floats(1.0, 100.0))
    sequence = draw(st.none() | st.floats(1.0, 100.0)) if token is None else None
    return Correction(token_truncation=token, sequence_truncation=sequence, **bounds)


@st.composite
def losses(draw: st.DrawFn) -> LossConfig:
    loss = draw(ANY_LOSS)
    aggregation = draw(st.sampled_from(Aggregation))
    settings: dict[str, Any] = {"aggregation": aggregation}
    if aggregation is Aggregation.CONSTANT:
        settings["aggregation_length"] = draw(st.integers(1, 2**32 - 1))
    if not isinstance(loss, ValueLoss):
        settings |= {"kl_coef": draw(HIGH), "entropy_coef": draw(st.floats(-1.0, 1.0))}
    if LossConfig(loss=loss).has_ratio:
        settings["old_policy"] = draw(st.sampled_from(OldPolicy))
    return LossConfig(
        loss=loss,
        kl_estimator=draw(st.sampled_from(KlEstimator)),
        correction=draw(corrections()),
        denominator=draw(st.none() | st.floats(1e-3, 1e9)),
        **settings,
    )


@given(losses())
def test_what_a_client_sends_is_what_the_trainer_minimizes(config: LossConfig) -> None:
    message = loss_pb2.LossConfig.FromString(loss_to_proto(config).SerializeToString())
    assert decode_loss(message) == config


@pytest.mark.parametrize(("name", "cls"), LOSSES.items())
def test_a_name_alone_takes_every_default(name: str, cls: type) -> None:
    assert decode_loss(loss_pb2.LossConfig(name=name)) == LossConfig(loss=cls())


def test_an_empty_correction_corrects_nothing() -> None:
    correction = decode_loss(loss_pb2.LossConfig(name="ppo", settings={"correction": {}})).correction
    assert (correction.truncates, correction.masks) == (False, False)


@pytest.mark.parametrize(
    ("name", "settings", "field"),
    [
        ("", {}, "name"),
        ("ppo", {"clip": 0.2}, "settings.clip"),
        ("ppo", {"clip_high": math.nan}, "settings.clip_high"),
        ("ppo", {"correction": {"token_mask": [2, 3]}}, "settings.correction.token_mask"),
    ],
)
def test_a_wrong_setting_is_named(name: str, settings: dict[str, Any], field: str) -> None:
    with refusing(f"header.loss.{field}"):
        decode_loss(loss_pb2.LossConfig(name=name, settings=settings))
