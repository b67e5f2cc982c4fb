"""Experts of tokens between rollout and trainer: their form, parts of messages, joined parts of samples, refusals, and planned bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from tasuki.algorithms.loss_types import LossConfig, OldPolicy
from tasuki.client import SamplingParams, encode, generation
from tasuki.client.generation import draw
from tasuki.client.turns import Turn, Turns
from tasuki.client.types import FinishReason, Sample, TrainingSample
from tasuki.client.version_spans import continued, unfinished
from tasuki.config.checks import replays_routes
from tasuki.config.schema import NodeConfig
from tasuki.models.routes import RouteShape
from tasuki.models.shape import ModelShape
from tasuki.planner.node import Part
from tasuki.planner.plan import plan
from tasuki.planner.presets import MODELS
from tasuki.trainer.data.checks import BatchLimits, check_routed
from tasuki.trainer.data.micro_batch import SequencePart, token_batch
from tasuki.trainer.data.plan import _groups_of_prompts
from tasuki.trainer.service import requests
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import decode_parts, encode_parts
from tasuki.v1 import rollout_pb2, types_pb2
from tasuki.v1.trainer_pb2 import TokenLogProbs
from tasuki.wire.channel import MAX_CHUNK_BYTES
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.routes import Whole, in_parts
from tests.planned import node_with
from tests.refusal import refusing
from tests.unit.training_samples import make_sample

MOE = MODELS["qwen3-30b-a3b"]

SHAPE = RouteShape(num_layers=2, experts_per_token=2, num_experts=8, sparse_layers=(1,))
WIDE = replace(SHAPE, num_experts=300)


def rows(num_tokens: int, shape: RouteShape = SHAPE) -> NDArray[Any]:
    """Of a dense layer, zeros, and of a sparse one, two experts."""
    first = np.arange(num_tokens) % 7 + shape.num_experts - 8
    return np.stack([0 * first, 0 * first, first, first + 1], axis=1).astype(shape.dtype)


def routed(num_tokens: int, **fields: Any) -> types_pb2.TrainingSample:
    return make_sample(routed_experts=rows(num_tokens).tobytes(), **fields)


@pytest.mark.parametrize("shape", [SHAPE, WIDE])
def test_experts_reach_the_ranks_as_rollout_reported_them(shape: RouteShape) -> None:
    samples = [make_sample(routed_experts=rows(4, shape).tobytes()), make_sample(prompt_token_ids=[7])]
    samples[1].routed_experts = rows(3, shape).tobytes()
    decoded = decode_samples(samples, routes=shape)
    found = decode_parts(encode_parts(decoded, [[1, 0]]))[0].routes_TR
    assert found is not None and shape.token_bytes == 4 * (1 if shape is SHAPE else 2)
    np.testing.assert_array_equal(found, np.concatenate([rows(3, shape), [[0] * 4], rows(4, shape), [[0] * 4]]))


def test_parts_of_a_micro_batch_have_their_tokens_experts_and_dummies_none() -> None:
    samples = decode_samples([routed(4), routed(3, prompt_token_ids=[7])], routes=SHAPE)
    parts = [token_batch(samples, device="cpu", part=SequencePart(index, 4)).routes_TR for index in range(4)]
    found = np.concatenate([part.numpy() for part in parts if part is not None])
    np.testing.assert_array_equal(found, np.concatenate([rows(4), rows(3), [[-1] * 4]]))


REFUSED = {
    "missing": (b"", "samples[1].routed_experts", "has 0 bytes; give 16"),
    "short": (rows(3).tobytes(), "samples[1].routed_experts", "has 12 bytes; give 16"),
    "unknown": (rows(4).tobytes()[:-1] + b"\x08", "samples[1].routed_experts[3]", "expert 8 in layer 1; the model has 8"),
    "doubled": (rows(3).tobytes() + b"\0\0\5\5", "samples[1].routed_experts[3]", "expert 5 twice in layer 1"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_experts_that_no_router_could_choose_are_refused_by_sample(kind: str) -> None:
    content, field, problem = REFUSED[kind]
    with refusing(field, match=problem):
        decode_samples([routed(4), make_sample(routed_experts=content)], routes=SHAPE)


@pytest.mark.parametrize("old_policy", [OldPolicy.CURRENT, OldPolicy.GIVEN])
def test_a_call_without_experts_is_refused_where_they_are_replayed(old_policy: OldPolicy) -> None:
    limits = BatchLimits(131, 64, 64, routes=SHAPE, replays_old_policy=old_policy is OldPolicy.GIVEN)
    with refusing("samples[0].routed_experts"):
        check_routed(decode_samples([make_sample()], routes=SHAPE), config=LossConfig(old_policy=old_policy), limits=limits)


def test_experts_of_another_shape_than_the_tokens_are_refused() -> None:
    sample = TrainingSample(
        prompt_token_ids=[5, 6], completion_token_ids=[7, 8, 9], routed_experts=np.eye(4, 8, dtype=np.uint8)
    )
    assert encode.training_sample_to_proto(sample, index=0).routed_experts == np.eye(4, 8, dtype=np.uint8).tobytes()
    with refusing("samples[1].routed_experts", match="8 rows"):
        encode.training_sample_to_proto(replace(sample, routed_experts=np.eye(8, 4, dtype=np.uint8)), index=1)
    image = replace(sample, images=[b"file"], routed_experts=np.eye(8, 4, dtype=np.uint8))
    assert len(encode.training_sample_to_proto(image, index=0).routed_experts) == 32


def test_a_call_beyond_the_training_log_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_MAX_ROUTE_BYTES", 31)
    with pytest.raises(InvalidArgument, match="make several calls"):
        decode_samples([routed(4), routed(4)], routes=SHAPE)


def test_samples_share_a_prompt_only_with_its_experts() -> None:
    other = rows(4)
    other[1, 2:] = 0, 4
    last = rows(4)
    last[2, 2:] = 0, 4  # of the completion
    samples = [routed(4), make_sample(routed_experts=other.tobytes()), make_sample(routed_experts=last.tobytes())]
    assert _groups_of_prompts(decode_samples(samples, routes=SHAPE)) == [[0, 2]]


def test_experts_beyond_a_message_travel_in_parts_of_several_samples_at_once() -> None:
    generator = np.random.default_rng(0)
    contents = [generator.bytes(num_bytes) for num_bytes in (3 * MAX_CHUNK_BYTES, 10, MAX_CHUNK_BYTES + 1)]
    samples = [
        types_pb2.Sample(prompt_index=index, token_ids=[1, 2], routed_experts=content) for index, content in enumerate(contents)
    ]
    streams = [list(in_parts([sample])) for sample in samples]
    assert all(entry.ByteSize() <= MAX_CHUNK_BYTES for stream in streams for entry in stream)
    mixed = [stream[place] for place in range(max(map(len, streams))) for stream in streams if place < len(stream)]
    whole = Whole()
    read = [sample for entry in mixed for sample in whole.samples([entry])]
    assert sorted(read, key=lambda sample: sample.prompt_index) == samples
    trained = make_sample(routed_experts=contents[0])
    assert list(Whole().samples(in_parts([trained, make_sample()]))) == [trained, make_sample()]
    scored = [TokenLogProbs(log_probs=[-1.0], routed_experts=content, route_bytes=4) for content in contents]
    assert list(Whole().samples(in_parts(scored))) == scored


async def test_a_drawn_sample_has_the_experts_that_came_before_it_in_parts() -> None:
    content = np.random.default_rng(0).bytes(3 * MAX_CHUNK_BYTES)
    sent = types_pb2.Sample(token_ids=[1, 2], finish_reason=1, routed_experts=content, route_bytes=len(content) // 2)

    class Rollout:
        async def Generate(self, *_: object, timeout: float) -> AsyncIterator[rollout_pb2.GenerateResponse]:
            for entry in in_parts([sent]):
                yield rollout_pb2.GenerateResponse(samples=[entry])

    drawn = await draw(cast(Any, Rollout()), generation.Part([5], SamplingParams(), 1), timeout_s=5)
    assert drawn is not None and np.asarray(drawn.routed_experts).tobytes() == content


def sample_of(prompt: list[int], token_ids: list[int], first: int) -> Sample:
    """A sample whose tokens have experts numbered from `first`."""
    routes = np.arange(first, first + len(prompt) + len(token_ids) - 1, dtype=np.uint8)[:, None].repeat(2, axis=1)
    ids, zeros = np.array(token_ids, np.int32), np.zeros(len(token_ids), np.float32)
    return Sample(0, 0, ids, zeros, FinishReason.CUT, 0, prompt_token_ids=np.array(prompt, np.int32), routed_experts=routes)


def test_a_continued_sample_keeps_the_experts_with_which_each_token_was_drawn() -> None:
    before, after = sample_of([1, 2], [3, 4], 10), sample_of([1, 2, 3, 4], [5], 50)
    sampling = SamplingParams(max_new_tokens=9)
    joined = continued(continued(unfinished([1, 2]), before, sampling, str), after, sampling, str)
    assert np.asarray(joined.routed_experts)[:, 0].tolist() == [10, 11, 12, 53]
    again = encode.sample_from_text(encode.sample_to_text(joined), prompt_token_ids=())
    np.testing.assert_array_equal(again.routed_experts, joined.routed_experts)


def test_turns_join_their_experts_to_one_for_each_token_but_the_last() -> None:
    first = sample_of([1, 2], [3], 10)
    second = sample_of([1, 2, 3, 4, 5], [6, 7], 50)
    trained = TrainingSample.of_turns([[1, 2], first, [4, 5], second])
    turns = Turns()
    parent = Turn(None, np.array([1, 2], np.int32), first)
    turns.add(parent)
    turns.add(Turn(parent, np.array([4, 5], np.int32), second))
    (branch,) = turns.samples()
    for routes in (trained.routed_experts, branch.routed_experts):
        assert np.asarray(routes)[:, 0].tolist() == [10, 11, 52, 53, 54, 55]
    message = encode.training_sample_to_proto(TrainingSample.of(branch), index=0)
    assert len(message.routed_experts) == 2 * (len(message.prompt_token_ids) + len(message.completion_token_ids) - 1)
    np.testing.assert_array_equal(encode.training_sample_from_proto(message).routed_experts, branch.routed_experts)
    message.images.append(b"of tokens that the client cannot count")
    kept = encode.training_sample_to_proto(encode.training_sample_from_proto(message), index=0)
    assert kept.routed_experts == message.routed_experts
    message.ClearField("images")
    as_json = replace(TrainingSample.of(branch), routed_experts=np.asarray(branch.routed_experts).tolist())
    assert encode.training_sample_to_proto(as_json, index=0) == message
    with refusing("samples[3].routed_experts"):
        encode.training_sample_to_proto(replace(as_json, routed_experts=[[256]]), index=3)


def test_the_engines_copy_of_its_tokens_experts_is_planned() -> None:
    settings: dict[str, Any] = {"num_ranks": 8, "rollout": {"tp_size": 4}, "kv_tokens": 100_000}
    without = plan(node_with("qwen3-30b-a3b", **settings, trainer={"router_replay": False}))
    replaying = node_with("qwen3-30b-a3b", **settings)
    planned = plan(replaying)
    num_bytes = 8 * (planned.kv_pool.num_tokens + 9) * 48 * 8
    for stage, other in zip(planned.stages, without.stages, strict=True):
        assert stage.host[Part.ROUTES] == num_bytes == stage.host_bytes - other.host_bytes
    dense = replace(replaying, model=MODELS["qwen2.5-7b"])
    assert Part.ROUTES not in plan(dense).stages[0].host


@pytest.mark.parametrize(
    ("model", "settings", "is_replayed"),
    [
        (MOE, {}, True),
        (MOE, {"trainer": {"router_replay": False}}, False),
        (MOE, {"device": "cuda", "rollout": {"engine": {"speculative_algorithm": "NGRAM"}}}, False),
        (MOE, {"sft": {"dataset": "rows.jsonl", "output_dir": "out"}}, False),
        (replace(MOE, architecture="GptOssForCausalLM"), {"device": "cuda"}, False),
        (replace(MOE, architecture="GptOssForCausalLM"), {"device": "cpu"}, True),
        (MODELS["qwen2.5-7b"], {"trainer": {"router_replay": True}}, False),
        (MOE, {"trainer": {"router_replay": "old_policy"}}, False),
    ],
)
def test_experts_are_replayed_by_default_where_the_engine_reports_them(
    model: ModelShape, settings: dict[str, Any], is_replayed: bool
) -> None:
    config = NodeConfig.model_validate({"state_dir": "node", "model": {"path": "model"}, **settings})
    assert replays_routes(config, model) is is_replayed
