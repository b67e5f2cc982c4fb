"""Conversions of the client: from generated to training samples, and values that cannot be sent."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from tasuki.algorithms.loss_types import Aggregation, LossConfig
from tasuki.algorithms.losses.ppo import PpoLoss
from tasuki.client import generation
from tasuki.client.async_client import AsyncClient
from tasuki.client.encode import loss_of_part, loss_to_proto, training_sample_to_proto
from tasuki.client.sync_client import Client
from tasuki.client.types import FinishReason, Sample, SamplingParams, TrainingSample
from tasuki.v1 import types_pb2
from tasuki.wire.errors import InvalidArgument
from tests.refusal import refusing

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
TRAINED = TrainingSample([1, 2], [3, 4], rollout_log_probs=[-0.5, -0.25], advantages=1.0)


def test_a_training_sample_of_a_sample_has_all_that_rollout_knows_of_it() -> None:
    made = TrainingSample.of(SAMPLE, prompt_token_ids=[1, 2], advantages=0.75, loss_mask=[1.0, 0.0])
    message = training_sample_to_proto(made, index=0)
    assert list(message.prompt_token_ids) == [1, 2]
    assert list(message.completion_token_ids) == [3, 4]
    assert list(message.rollout_log_probs) == [-0.5, -0.25]
    assert (message.policy_version, message.temperature) == (7, 0.5)
    assert (list(message.advantages), list(message.loss_mask)) == ([0.75], [1.0, 0.0])


def _turn(token_ids: list[int], **other: Any) -> Sample:
    log_probs = np.full(len(token_ids), -0.5, dtype=np.float32)
    return replace(SAMPLE, token_ids=np.array(token_ids, dtype=np.int32), rollout_log_probs=log_probs, **other)


def test_turns_become_one_sample_that_counts_what_was_sampled() -> None:
    second = _turn([8], prompt_token_ids=np.array([1, 2, 3, 4, 6, 7], dtype=np.int32))
    made = TrainingSample.of_turns([[1], np.array([2]), SAMPLE, [6, 7], second, [9]], advantages=0.75)
    assert made.prompt_token_ids == [1, 2]
    assert made.completion_token_ids == [3, 4, 6, 7, 8, 9]
    assert made.rollout_log_probs == [-0.5, -0.25, 0.0, 0.0, -0.5, 0.0]
    assert made.loss_mask == [1, 1, 0, 0, 1, 0]
    assert (made.advantages, made.policy_version, made.temperature) == (0.75, 7, 0.5)


@pytest.mark.parametrize(
    ("turns", "field", "problem"),
    [
        ([], "turns", "no Sample"),
        ([[1], [2]], "turns", "no Sample"),
        ([SAMPLE], "turns[0]", "begin with"),
        ([[1], cast(Any, None), SAMPLE], "turns[1]", "is None"),
        ([[1], SAMPLE, "tool output"], "turns[2].token_ids", "encode_prompt"),
        ([[1], SAMPLE, [5], _turn([6], policy_version=8)], "turns[3]", "policy_version 8, the turns before it with 7"),
        ([[1], SAMPLE, [5], _turn([6], temperature=1.0)], "turns[3]", "temperature 1, the turns before it with 0.5"),
        ([[1], SAMPLE, [5], _turn([6], prompt_token_ids=np.array([1, 3, 9, 5]))], "turns[3]", "at token 2"),
        ([[1], SAMPLE, [5], _turn([6], prompt_token_ids=np.array([1, 3, 4]))], "turns[3]", "at token 3"),
    ],
)
def test_a_turn_that_does_not_continue_those_before_it_is_named(turns: list[Any], field: str, problem: str) -> None:
    with refusing(field, match=problem):
        TrainingSample.of_turns(turns)


def test_a_part_of_a_step_divides_by_the_count_of_the_whole() -> None:
    samples = [
        TrainingSample([1], [2, 3, 4]),
        TrainingSample([1], np.array([2, 3]), loss_mask=np.array([0.0, 1.0])),
        TrainingSample([1], [2], loss_mask=[0.0]),
    ]
    by_sequence = LossConfig(aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN, kl_coef=0.5)
    assert loss_of_part(LossConfig(), samples[:1], step_samples=samples).denominator == 4.0
    assert loss_of_part(by_sequence, samples[:1], step_samples=samples) == replace(by_sequence, denominator=2.0)
    others = [replace(sample) for sample in samples]
    for loss, whole in (
        (LossConfig(), samples[:1]),
        (LossConfig(denominator=4.0), samples),
        (LossConfig(), others),
        (LossConfig(), 3),
    ):
        with refusing("step_samples"):
            loss_of_part(loss, samples, step_samples=cast(Any, whole))


@pytest.mark.parametrize("prompts", ["What is 2 + 2?", ["What is 2 + 2?"], [["a", "b"]], [[{"role": "user", "content": "a"}]]])
def test_a_text_in_place_of_token_ids_is_answered_with_how_to_tokenize_it(prompts: Any) -> None:
    with pytest.raises(InvalidArgument, match="encode_prompt"):
        generation.requests(prompts, SamplingParams(), num_samples=1, call_number=None)


@pytest.mark.parametrize(
    ("send", "field"),
    [
        (lambda: asyncio.run(CLIENT.generate([])), "prompts"),
        (lambda: asyncio.run(CLIENT.generate([[2**31]])), "prompts[0].token_ids"),
        (lambda: asyncio.run(CLIENT.generate([np.zeros(5_000_000, dtype=np.int32)])), "prompts[0]"),
        (lambda: asyncio.run(CLIENT.forward_backward([])), "samples"),
        (lambda: asyncio.run(CLIENT.forward_backward(cast(Any, TRAINED))), "samples"),
        (lambda: asyncio.run(CLIENT.forward_backward([TRAINED], log_probs_of=[1])), "log_probs_of"),
        # It waited until the deadline, ten minutes by default.
        (lambda: asyncio.run(CLIENT.forward_backward([TRAINED], role=cast(Any, "critic"))), "role"),
        (
            lambda: asyncio.run(CLIENT.forward_backward([TRAINED, TrainingSample(cast(Any, [1.5]), [2])])),
            "samples[1].prompt_token_ids",
        ),
        (lambda: asyncio.run(CLIENT.compute_log_probs([TRAINED], role=cast(Any, 3))), "role"),
        (lambda: asyncio.run(CLIENT.acquire(cast(Any, "rollout"))), "phase"),
        (lambda: asyncio.run(CLIENT.save(cast(Any, None))), "path"),
        (lambda: asyncio.run(CLIENT.export_model("/tmp/\udcff")), "path"),
        (lambda: asyncio.run(CLIENT.optim_step(schedule_step=-1)), "schedule_step"),
        (lambda: asyncio.run(CLIENT.optim_step(learning_rate=cast(Any, "0.1"))), "learning_rate"),
        (lambda: asyncio.run(CLIENT.begin_run(keep_optimizer=cast(Any, "no"))), "keep_optimizer"),
        (lambda: asyncio.run(CLIENT.changeovers(limit=cast(Any, "all"))), "limit"),
        (lambda: Client(), "target"),
        (lambda: Client(target="127.0.0.1:1", timeout_s=NAN), "timeout_s"),
        (lambda: Client(target="127.0.0.1:1", recovery_timeout_s=-1), "recovery_timeout_s"),
        (lambda: Client(target="127.0.0.1:1", credentials=cast(Any, "lab")), "credentials"),
        (lambda: loss_to_proto(cast(Any, PpoLoss())), "loss"),
        (lambda: training_sample_to_proto(cast(Any, None), index=3), "samples[3]"),
        (lambda: training_sample_to_proto(TrainingSample([1], ["2"]), index=3), "samples[3].completion_token_ids"),
        (lambda: training_sample_to_proto(TrainingSample([1], [2, 3], advantages=[0.5]), index=3), "samples[3].advantages"),
        (lambda: TrainingSample.of_turns([[1], SAMPLE], advantages=[0.5]), "advantages"),
        (lambda: training_sample_to_proto(TrainingSample([1], [2], advantages=["0.5"]), index=3), "samples[3].advantages"),
        (
            lambda: training_sample_to_proto(TrainingSample([1], [2], rollout_log_probs=0.5), index=3),
            "samples[3].rollout_log_probs",
        ),
        (lambda: training_sample_to_proto(TrainingSample([1], [2], temperature=NAN), index=3), "samples[3].temperature"),
        (lambda: generation.requests([[1], "two"], SamplingParams(), num_samples=1, call_number=None), "prompts[1].token_ids"),
        (lambda: generation.requests([[1]], SamplingParams(), num_samples=0, call_number=None), "num_samples"),
        (lambda: generation.requests([[1]], SamplingParams(), num_samples=1, call_number=-1), "call_number"),
        (lambda: generation.requests([[1]], SamplingParams(), num_samples=1, session_key=5), "session_key"),
        (lambda: generation.requests([[1]], types_pb2.SamplingParams(), num_samples=1, call_number=None), "sampling_params"),
    ],
)
def test_what_cannot_be_sent_is_named_before_the_node_is_asked(send: Callable[[], object], field: str) -> None:
    with refusing(field):
        send()


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
        ("stop", ["</answer>", [5], [b"\xff"], 7]),
        ("logit_bias", [[5], {5: NAN}, {5: True}, {"a": 1.0}, {2**31: 1.0}]),
        ("json_schema", [5, ["{}"]]),
    ],
)
def test_a_sampling_parameter_of_the_wrong_type_or_size_is_named(name: str, values: list[Any]) -> None:
    for value in values:
        with refusing(name) as refused:
            SamplingParams(**{name: value})
        assert repr(value)[:20] in refused.value.message and "; give " in refused.value.message


def test_sampling_parameters_send_what_was_given_and_leave_out_the_rest() -> None:
    params = SamplingParams(max_new_tokens=np.int64(3), temperature=0, ignore_eos=np.True_, stop_token_ids=np.array([7, 8]))
    message = params.message()
    assert message == types_pb2.SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True, stop_token_ids=[7, 8])
    assert SamplingParams().message() == types_pb2.SamplingParams()
    message = SamplingParams(stop=["a", "é"], logit_bias={7: -1}, json_schema={"type": "null"}).message()
    assert message == types_pb2.SamplingParams(stop=["a", "é"], logit_bias={7: -1.0}, json_schema='{"type": "null"}')
