"""Conversions of the client: from generated to training samples, and values that cannot be sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from tasuki.algorithms.losses.ppo import PpoLoss
from tasuki.client import generation
from tasuki.client.async_client import AsyncClient
from tasuki.client.encode import loss_to_proto, training_sample_to_proto
from tasuki.client.types import FinishReason, Sample, SamplingParams, TrainingSample
from tasuki.v1 import types_pb2
from tasuki.wire.errors import InvalidArgument

NAN = float("nan")
CLIENT = AsyncClient("unix:/nobody")
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
        (lambda: asyncio.run(CLIENT.optim_step(schedule_step=-1)), "schedule_step"),
        (lambda: asyncio.run(CLIENT.optim_step(learning_rate=cast(Any, "0.1"))), "learning_rate"),
        (lambda: asyncio.run(CLIENT.optim_step(learning_rate=NAN)), "learning_rate"),
        (lambda: asyncio.run(CLIENT.begin_run(keep_optimizer=cast(Any, "no"))), "keep_optimizer"),
        (lambda: asyncio.run(CLIENT.changeovers(limit=cast(Any, "all"))), "limit"),
        (lambda: loss_to_proto(cast(Any, PpoLoss())), "loss"),
        (lambda: training_sample_to_proto(cast(Any, None), index=3), "samples[3]"),
        (lambda: training_sample_to_proto(TrainingSample([1], ["2"]), index=3), "samples[3].completion_token_ids"),
        (lambda: training_sample_to_proto(TrainingSample([1], [2], advantages=["0.5"]), index=3), "samples[3].advantages"),
        (lambda: training_sample_to_proto(TrainingSample([1], [2], advantages="high"), index=3), "samples[3].advantages"),
        (
            lambda: training_sample_to_proto(TrainingSample([1], [2], rollout_log_probs=0.5), index=3),
            "samples[3].rollout_log_probs",
        ),
        (lambda: training_sample_to_proto(TrainingSample([1], [2], policy_version=-1), index=3), "samples[3].policy_version"),
        (lambda: training_sample_to_proto(TrainingSample([1], [2], temperature=NAN), index=3), "samples[3].temperature"),
        (lambda: generation.requests([[1], "two"], SamplingParams(), num_samples=1, call_number=None), "prompts[1].token_ids"),
        (lambda: generation.requests([[1]], SamplingParams(), num_samples=2**40, call_number=None), "num_samples"),
        (lambda: generation.requests([[1]], SamplingParams(), num_samples=0, call_number=None), "num_samples"),
        (lambda: generation.requests([[1]], SamplingParams(), num_samples=1, call_number=-1), "call_number"),
        (lambda: generation.requests([[1]], types_pb2.SamplingParams(), num_samples=1, call_number=None), "sampling_params"),
    ],
)
def test_what_cannot_be_sent_is_named(send: Callable[[], object], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        send()
    assert refused.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_new_tokens", ["16", 16.5, True, NAN, -1, 0, 2**32]),
        ("min_new_tokens", ["1", NAN, -1, 2**32]),
        ("temperature", ["hot", True, NAN, -0.5, float("inf"), 1e39, 10**400]),
        ("top_p", ["1", NAN, 0.0, 1.5, -1]),
        ("top_k", [1.5, NAN, 0, -2, 2**31]),
        ("min_p", [NAN, -0.1, 1.1]),
        ("frequency_penalty", [NAN, 3.0]),
        ("presence_penalty", [[], -3.0]),
        ("repetition_penalty", [NAN, 0.0, 1e30]),
        ("stop_token_ids", [5, "ab", [1.5], [2**31], [None]]),
        ("ignore_eos", ["no", 1, NAN]),
        ("sampling_seed", ["seed", 0.5, NAN, 2**63]),
    ],
)
def test_a_sampling_parameter_of_the_wrong_type_or_size_is_named(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidArgument) as refused:
            SamplingParams(**{name: value})
        assert refused.value.metadata["field"] == name
        assert repr(value)[:20] in refused.value.message and "; give " in refused.value.message


def test_sampling_parameters_send_what_was_given_and_leave_out_the_rest() -> None:
    params = SamplingParams(max_new_tokens=np.int64(3), temperature=0, ignore_eos=np.True_, stop_token_ids=np.array([7, 8]))
    message = params.message()
    assert message == types_pb2.SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True, stop_token_ids=[7, 8])
    assert SamplingParams().message() == types_pb2.SamplingParams()
