"""Conversions of the client: from generated to training samples, and values that cannot be sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from tasuki.algorithms.losses.ppo import PpoLoss
from tasuki.client.encode import (
    loss_to_proto,
    optim_step_to_proto,
    training_sample_to_proto,
)
from tasuki.client.types import FinishReason, Role, Sample, TrainingSample
from tasuki.wire.errors import InvalidArgument

SAMPLE = Sample(
    prompt_index=0,
    sample_index=1,
    token_ids=np.array([3, 4], dtype=np.int32),
    rollout_log_probs=np.array([-0.5, -0.25], dtype=np.float32),
    finish_reason=FinishReason.STOP,
    policy_version=7,
    temperature=0.5,
)


def test_a_training_sample_of_a_sample_has_all_that_rollout_knows_of_it() -> None:
    made = TrainingSample.of(SAMPLE, prompt_token_ids=[1, 2], advantages=0.75, loss_mask=[1.0, 0.0])
    message = training_sample_to_proto(made, index=0)
    assert list(message.prompt_token_ids) == [1, 2]
    assert list(message.completion_token_ids) == [3, 4]
    assert list(message.rollout_log_probs) == [-0.5, -0.25]
    assert (message.policy_version, message.temperature) == (7, 0.5)
    assert (list(message.advantages), list(message.loss_mask)) == ([0.75], [1.0, 0.0])


@pytest.mark.parametrize(
    ("send", "field"),
    [
        (lambda: optim_step_to_proto(Role.POLICY, schedule_step=-1), "schedule_step"),
        (lambda: optim_step_to_proto(Role.POLICY, learning_rate=cast(Any, "0.1")), "learning_rate"),
        (lambda: loss_to_proto(cast(Any, PpoLoss())), "loss"),
        (lambda: training_sample_to_proto(cast(Any, None), index=3), "samples[3]"),
    ],
)
def test_what_cannot_be_sent_is_named(send: Callable[[], object], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        send()
    assert refused.value.metadata["field"] == field
