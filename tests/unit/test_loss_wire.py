"""Loss of a call on the wire: every setting arrives, and unset ones take their defaults."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from tasuki.algorithms.loss_types import (
    Aggregation,
    Correction,
    KlEstimator,
    LossConfig,
    OldPolicy,
    ValueLoss,
)
from tasuki.client.encode import loss_to_proto
from tasuki.config.loss_table import LOSSES
from tasuki.trainer.ranks.loss import decode_loss
from tasuki.v1 import loss_pb2
from tasuki.wire.errors import InvalidArgument
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
    message = json_format.ParseDict({name: {}}, loss_pb2.LossConfig())
    assert decode_loss(message) == LossConfig(loss=cls())


def test_an_empty_correction_corrects_nothing() -> None:
    message = json_format.ParseDict({"ppo": {}, "correction": {}}, loss_pb2.LossConfig())
    correction = decode_loss(message).correction
    assert (correction.truncates, correction.masks) == (False, False)


@pytest.mark.parametrize(
    ("given_fields", "field"),
    [
        ({}, "header.loss"),
        ({"ppo": {"clip_low": 1.5}}, "header.loss.ppo.clip_low"),
        ({"ppo": {"clip_high": -0.1}}, "header.loss.ppo.clip_high"),
        ({"ppo": {"clip_high": "NaN"}}, "header.loss.ppo.clip_high"),
        ({"ppo": {"dual_clip": 1.0}}, "header.loss.ppo.dual_clip"),
        ({"gspo": {"clip_low": 1.5}}, "header.loss.gspo.clip_low"),
        ({"value": {"clip": 0.0}}, "header.loss.value.clip"),
        ({"value": {"clip": -1.0}}, "header.loss.value.clip"),
        ({"value": {}, "kl_coef": 0.1}, "header.loss.kl_coef"),
        ({"ppo": {}, "kl_coef": -1.0}, "header.loss.kl_coef"),
        ({"ppo": {}, "entropy_coef": "Infinity"}, "header.loss.entropy_coef"),
        ({"ppo": {}, "denominator": 0.0}, "header.loss.denominator"),
        ({"ppo": {}, "aggregation": 9}, "header.loss.aggregation"),
        ({"ppo": {}, "kl_estimator": 9}, "header.loss.kl_estimator"),
        ({"ppo": {}, "old_policy": 9}, "header.loss.old_policy"),
        ({"ppo": {}, "aggregation": 4}, "header.loss.aggregation_length"),
        ({"ppo": {}, "aggregation_length": 7}, "header.loss.aggregation_length"),
        ({"sft": {}, "old_policy": 2}, "header.loss.old_policy"),
        ({"ppo": {}, "correction": {"token_truncation": 0.5}}, "header.loss.correction.token_truncation"),
        (
            {"ppo": {}, "correction": {"token_truncation": 2, "sequence_truncation": 2}},
            "header.loss.correction.sequence_truncation",
        ),
        ({"ppo": {}, "correction": {"token_mask": {"low": 2, "high": 3}}}, "header.loss.correction.token_mask"),
    ],
)
def test_a_setting_out_of_range_is_named(given_fields: dict[str, Any], field: str) -> None:
    message = json_format.ParseDict(given_fields, loss_pb2.LossConfig())
    with pytest.raises(InvalidArgument) as refused:
        decode_loss(message)
    assert refused.value.metadata["field"] == field


def test_every_loss_has_a_message_of_its_name_and_fields() -> None:
    oneof = loss_pb2.LossConfig.DESCRIPTOR.oneofs_by_name["loss"]
    messages = {each.message_type.name: each.message_type for each in oneof.fields if each.message_type is not None}
    assert messages.keys() == {cls.__name__ for cls in LOSSES.values()}
    for cls in LOSSES.values():
        assert [field.name for field in messages[cls.__name__].fields] == [field.name for field in fields(cls)]
