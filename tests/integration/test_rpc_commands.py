"""Commands over a real socket: carried out once, in order, and for one coordinator at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest

from tasuki.v1 import trainer_pb2, trainer_pb2_grpc
from tasuki.wire.errors import (
    InvalidArgument,
    StaleEpoch,
    StaleSequence,
)
from tests.integration.counting_trainer import Served, command, serving
from tests.refusal import refused


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as served:
        yield served


async def test_repeated_request_id_runs_once_even_while_it_runs(served: Served) -> None:
    servicer, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    servicer.release.clear()
    calls = [stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("a")), timeout=60) for _ in range(4)]
    await asyncio.sleep(0.05)
    servicer.release.set()
    answers = [await call for call in calls]
    assert [answer.version for answer in answers] == [1, 1, 1, 1]
    assert servicer.num_steps == 1


async def test_a_request_id_used_for_another_request_is_refused(served) -> None:
    servicer, channel, _ = served
    servicer.gate.look(1)
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    first: Any = stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("a")), timeout=60)
    await first
    other_content = stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("a"), learning_rate=0.5), timeout=60)
    other_method = stub.PublishWeights(trainer_pb2.PublishWeightsRequest(command=command("a", epoch=1, sequence=1)), timeout=60)
    for call in (other_content, other_method):
        error = await refused(call)
        assert isinstance(error, InvalidArgument) and error.metadata["field"] == "command.request_id"
    assert servicer.num_steps == 1


async def test_command_outlives_a_caller_that_times_out(served: Served) -> None:
    servicer, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    servicer.release.clear()
    error = await refused(stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("slow")), timeout=0.05))
    assert error.reason == "DEADLINE_EXCEEDED"
    servicer.release.set()
    answer = await stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("slow")), timeout=60)
    assert answer.version == servicer.num_steps == 1


async def test_lower_epoch_and_old_sequence_are_refused(served: Served) -> None:
    servicer, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)

    def publish(request_id: str, epoch: int, sequence: int) -> Awaitable[trainer_pb2.PublishWeightsResponse]:
        request = trainer_pb2.PublishWeightsRequest(command=command(request_id, epoch=epoch, sequence=sequence))
        return stub.PublishWeights(request, timeout=60)

    servicer.gate.look(7)
    assert (await publish("a", 7, 3)).published_bytes == 3
    stale = await refused(publish("b", 6, 9))
    assert isinstance(stale, StaleEpoch) and stale.metadata == {"epoch": "6", "current_epoch": "7"}
    assert isinstance(await refused(publish("c", 7, 3)), StaleSequence)
    servicer.gate.look(8)
    assert (await publish("d", 8, 1)).published_bytes == 1


async def test_epoch_that_no_coordinator_has_shown_is_refused_and_changes_nothing(served: Served) -> None:
    servicer, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)

    def publish(request_id: str, epoch: int, sequence: int) -> Awaitable[trainer_pb2.PublishWeightsResponse]:
        request = trainer_pb2.PublishWeightsRequest(command=command(request_id, epoch=epoch, sequence=sequence))
        return stub.PublishWeights(request, timeout=60)

    assert isinstance(await refused(publish("before any look", 1, 1)), StaleEpoch)
    servicer.gate.look(7)
    for number, epoch in enumerate((8, 999, 2**40)):
        for sequence in (1, 2**40):
            wild = await refused(publish(f"wild {number} {sequence}", epoch, sequence))
            assert isinstance(wild, StaleEpoch) and wild.metadata == {"epoch": str(epoch), "current_epoch": "7"}
    assert (servicer.gate.epoch, servicer.gate.sequence) == (0, 0)
    assert (await publish("a", 7, 1)).published_bytes == 1


async def test_sequence_that_no_coordinator_comes_to_is_refused_and_changes_nothing(served: Served) -> None:
    servicer, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)

    def publish(request_id: str, sequence: int) -> Awaitable[trainer_pb2.PublishWeightsResponse]:
        request = trainer_pb2.PublishWeightsRequest(command=command(request_id, epoch=7, sequence=sequence))
        return stub.PublishWeights(request, timeout=60)

    servicer.gate.look(7)
    first = await refused(publish("wild at first", 10**9))
    assert isinstance(first, InvalidArgument) and first.metadata["field"] == "command.sequence"
    # A service restarted late in an epoch first sees a large number.
    assert (await publish("late in the epoch", 5_000_000)).published_bytes == 5_000_000
    later = await refused(publish("wild later", 10**9))
    assert isinstance(later, InvalidArgument) and later.metadata["current_sequence"] == "5000000"
    assert (await publish("next", 5_000_004)).published_bytes == 5_000_004


async def test_look_of_an_old_coordinator_that_arrives_late_shuts_the_new_one_not_out(served: Served) -> None:
    servicer, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    for epoch in (6, 7, 6):
        servicer.gate.look(epoch)
    first = trainer_pb2.PublishWeightsRequest(command=command("a", epoch=7, sequence=1))
    assert (await stub.PublishWeights(first, timeout=60)).published_bytes == 1
    late = trainer_pb2.PublishWeightsRequest(command=command("late", epoch=6, sequence=9))
    assert isinstance(await refused(stub.PublishWeights(late, timeout=60)), StaleEpoch)


async def test_command_of_an_old_epoch_that_arrives_after_a_newer_one_looked_is_not_carried_out(served: Served) -> None:
    servicer, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    servicer.gate.look(7)
    servicer.gate.look(0)  # another caller reads
    late = trainer_pb2.PublishWeightsRequest(command=command("late", epoch=6, sequence=9))
    stale = await refused(stub.PublishWeights(late, timeout=60))
    assert isinstance(stale, StaleEpoch) and stale.metadata == {"epoch": "6", "current_epoch": "7"}
    first = trainer_pb2.PublishWeightsRequest(command=command("a", epoch=7, sequence=1))
    assert (await stub.PublishWeights(first, timeout=60)).published_bytes == 1


async def test_an_unknown_epoch_shuts_a_coordinator_out_until_its_next_look_at_most(served: Served) -> None:
    servicer, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    servicer.gate.look(999)
    first = trainer_pb2.PublishWeightsRequest(command=command("a", epoch=7, sequence=1))
    assert isinstance(await refused(stub.PublishWeights(first, timeout=60)), StaleEpoch)
    await stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("b", epoch=7)), timeout=60)
    servicer.gate.look(7)
    second = trainer_pb2.PublishWeightsRequest(command=command("c", epoch=7, sequence=2))
    assert (await stub.PublishWeights(second, timeout=60)).published_bytes == 2
