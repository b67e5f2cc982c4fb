"""The trainer service of two ranks over gRPC: refused requests, and requests carried out only once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tasuki.v1 import trainer_pb2, types_pb2
from tasuki.v1.types_pb2 import TrainingSample
from tests.integration.trainer_process import TrainerClient, samples_of_now
from tests.models import VOCAB_SIZE
from tests.refusal import refused


async def test_a_repeated_request_id_gets_the_first_answer_and_does_nothing(client: TrainerClient) -> None:
    samples = await samples_of_now(client)
    first = await client.forward_backward(samples, request_id="repeat-1")
    again = await client.forward_backward(samples, request_id="repeat-1")
    assert again == first
    other = await refused(client.forward_backward(samples[:-1], request_id="repeat-1"))
    assert (other.reason, other.metadata["field"]) == ("INVALID_ARGUMENT", "command.request_id")
    step = await client.optim_step(request_id="repeat-2", learning_rate=0.0)
    assert await client.optim_step(request_id="repeat-2", learning_rate=0.0) == step
    assert (await client.state()).policy_version == step.version
    for role in (types_pb2.ROLE_CRITIC, 77):
        error = await refused(client.optim_step(request_id="repeat-2", role=role, validate_only=True))
        assert (error.reason, error.metadata["field"]) == ("INVALID_ARGUMENT", "role")
    await client.forward_backward(samples)
    alone = await client.optim_step(learning_rate=0.0)
    assert step.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)


async def test_a_bad_sample_is_named_and_nothing_is_added(client: TrainerClient) -> None:
    samples = await samples_of_now(client)
    bad = [TrainingSample.FromString(sample.SerializeToString()) for sample in samples]
    bad[5].completion_token_ids[:] = [3, VOCAB_SIZE, 3, 3, 3]
    error = await refused(client.forward_backward(bad))
    assert (error.reason, error.metadata["field"]) == ("INVALID_ARGUMENT", "samples[5].completion_token_ids[1]")
    assert not (await client.state()).has_gradients
    assert (await client.forward_backward(samples)).num_samples == len(samples)


async def test_log_probs_that_the_loss_saw_come_with_the_answer_in_the_order_asked_for(client: TrainerClient) -> None:
    samples = await samples_of_now(client)
    places = [len(samples) - 1, 0, 5]
    answer = await client.forward_backward(samples, log_probs_of=places)
    scored = await client.log_probs(samples)
    assert [len(row.log_probs) for row in answer.log_probs] == [len(samples[place].completion_token_ids) for place in places]
    for row, place in zip(answer.log_probs, places, strict=True):
        assert list(row.log_probs) == pytest.approx(scored[place], abs=1e-5)
    assert not (await client.forward_backward(samples)).log_probs


async def test_log_probs_of_a_sample_that_is_not_there_are_refused(client: TrainerClient) -> None:
    samples = await samples_of_now(client)
    error = await refused(client.forward_backward(samples, log_probs_of=[0, len(samples)]))
    assert (error.reason, error.metadata["field"]) == ("INVALID_ARGUMENT", "header.log_probs_of")
    assert (await refused(client.forward_backward(samples, log_probs_of=[0] * 131_073))).reason == "INVALID_ARGUMENT"
    assert not (await client.state()).has_gradients


@pytest.mark.parametrize("path", ["/a\0b", "/", "//", "/."])
async def test_a_path_of_no_folder_is_refused(client: TrainerClient, path: str) -> None:
    for call in (client.save(path), client.load(path), client.export(path)):
        error = await refused(call)
        assert (error.reason, error.metadata["field"]) == ("INVALID_ARGUMENT", "path")


async def test_a_stream_starts_with_its_header(client: TrainerClient) -> None:
    async def headless() -> AsyncIterator[trainer_pb2.ForwardBackwardRequest]:
        yield trainer_pb2.ForwardBackwardRequest(samples=trainer_pb2.TrainingSamples())

    error = await refused(client.trainer.ForwardBackward(headless(), timeout=10))
    assert error.metadata["field"] == "part"


async def test_a_step_needs_gradients(client: TrainerClient) -> None:
    assert (await refused(client.optim_step())).reason == "NO_GRADIENTS"


async def test_the_ring_of_stages_is_kept(client: TrainerClient) -> None:
    samples = await samples_of_now(client)
    await client.forward_backward(samples)
    assert (await refused(client.publish())).reason == "GRADIENTS_PENDING"
    assert (await refused(client.pause())).reason == "GRADIENTS_PENDING"
    await client.discard_gradients()
    await client.publish()
    assert (await refused(client.publish())).reason == "STAGE_ORDER"
    for call in (
        client.forward_backward(samples),
        client.optim_step(),
        client.log_probs(samples),
        client.save(Path("/nonexistent/checkpoint")),
    ):
        assert (await refused(call)).reason == "WRONG_PHASE"
    error = await refused(client.pause(tags=[types_pb2.MEMORY_TAG_KV_CACHE]))
    assert error.metadata["field"] == "tags[0]"
    paused = await client.pause()
    assert list((await client.state()).resident_tags) == []
    usages = [usage for usage in (await client.usage()).tags if usage.tag != types_pb2.MEMORY_TAG_EXPORT]
    assert all(usage.is_paused and usage.mapped_bytes == 0 for usage in usages)
    assert paused.released_bytes == sum(usage.total_bytes for usage in usages) > 0
    assert (await refused(client.withdraw())).reason == "STAGE_ORDER"
    assert (await client.resume()).mapped_bytes == paused.released_bytes
    state = await client.state()
    assert (len(state.resident_tags), state.stage, state.HasField("published_version")) == (
        3,
        types_pb2.STAGE_LOAD_TRAINER,
        False,
    )
    await client.withdraw()
    await client.forward_backward(samples)
