"""The trainer service of two ranks over gRPC: refused requests, and requests carried out only once."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tasuki.v1 import trainer_pb2, types_pb2
from tasuki.v1.types_pb2 import TrainingSample
from tests.integration.trainer_process import CALL_TIMEOUT_S, PPO, TrainerClient, command, samples_of_now
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
    await client.discard_gradients()
    assert not (await client.forward_backward(samples)).log_probs


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


async def test_a_call_whose_client_ends_amid_its_samples_does_nothing(client: TrainerClient) -> None:
    samples = await samples_of_now(client)
    header = trainer_pb2.ForwardBackwardHeader(
        command=command("cut-short"), role=types_pb2.ROLE_POLICY, loss=PPO, num_samples=len(samples)
    )

    async def messages(num_samples: int) -> AsyncIterator[trainer_pb2.ForwardBackwardRequest]:
        yield trainer_pb2.ForwardBackwardRequest(header=header)
        yield trainer_pb2.ForwardBackwardRequest(samples=trainer_pb2.TrainingSamples(samples=samples[:num_samples]))

    async def hanging() -> AsyncIterator[trainer_pb2.ForwardBackwardRequest]:
        async for message in messages(1):
            yield message
        await asyncio.sleep(60)

    assert (await refused(client.trainer.ForwardBackward(messages(1), timeout=10))).metadata["field"] == "header.num_samples"
    assert (await refused(client.trainer.ForwardBackward(hanging(), timeout=0.5))).reason == "DEADLINE_EXCEEDED"
    answer = await client.trainer.ForwardBackward(messages(len(samples)), timeout=CALL_TIMEOUT_S)
    assert answer.num_samples == len(samples)
    step = await client.optim_step(learning_rate=0.0)
    await client.forward_backward(samples)
    assert step.grad_norm == (await client.optim_step(learning_rate=0.0)).grad_norm


@pytest.mark.parametrize("places", [[0], [0, 2], [1, 1]])
async def test_each_sample_of_a_part_has_a_place_of_its_own_in_the_step(client: TrainerClient, places: list[int]) -> None:
    part = trainer_pb2.TrainingSamples(samples=(await samples_of_now(client))[:2])
    header = trainer_pb2.ForwardBackwardHeader(
        command=command(f"placed {places}"), role=types_pb2.ROLE_POLICY, loss=PPO, step_samples=2, step_places=places
    )
    messages = [trainer_pb2.ForwardBackwardRequest(header=header), trainer_pb2.ForwardBackwardRequest(samples=part)]
    error = await refused(client.trainer.ForwardBackward(iter(messages), timeout=10))
    assert (error.reason, error.metadata["field"]) == ("INVALID_ARGUMENT", "header.step_places")


async def test_a_step_needs_gradients(client: TrainerClient) -> None:
    assert (await refused(client.optim_step())).reason == "NO_GRADIENTS"
