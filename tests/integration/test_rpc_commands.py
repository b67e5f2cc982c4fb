"""Commands over a real socket: carried out once, in order, and for one coordinator at a time."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tasuki.v1 import trainer_pb2, trainer_pb2_grpc
from tasuki.wire.errors import InvalidArgument, StageOrder, StaleEpoch, StaleSequence
from tests.integration.counting_trainer import CountingTrainer, command, serving
from tests.refusal import refused


class Caller:
    """Calls of a trainer that counts what it carries out."""

    def __init__(self, servicer: CountingTrainer, stub: Any) -> None:
        self.servicer, self.gate, self._stub = servicer, servicer.gate, stub

    def step(self, request_id: str, *, epoch: int = 0, timeout_s: float = 60, **fields: float) -> Any:
        request = trainer_pb2.OptimStepRequest(command=command(request_id, epoch=epoch), **fields)
        return self._stub.OptimStep(request, timeout=timeout_s)

    def publish(self, request_id: str, epoch: int, sequence: int) -> Any:
        request = trainer_pb2.PublishWeightsRequest(command=command(request_id, epoch=epoch, sequence=sequence))
        return self._stub.PublishWeights(request, timeout=60)


@pytest.fixture
async def caller(tmp_path: Path) -> AsyncIterator[Caller]:
    async with serving(tmp_path) as (servicer, channel, _):
        yield Caller(servicer, trainer_pb2_grpc.TrainerServiceStub(channel))


async def test_repeated_request_id_runs_once_even_while_it_runs(caller: Caller) -> None:
    caller.servicer.release.clear()
    calls = [caller.step("a") for _ in range(4)]
    await asyncio.sleep(0.05)
    caller.servicer.release.set()
    assert [(await call).version for call in calls] == [1, 1, 1, 1]
    assert caller.servicer.num_steps == 1


async def test_a_request_id_used_for_another_request_is_refused(caller: Caller) -> None:
    caller.gate.look(1)
    await caller.step("a")
    for call in (caller.step("a", learning_rate=0.5), caller.publish("a", 1, 1)):
        error = await refused(call)
        assert isinstance(error, InvalidArgument) and error.metadata["field"] == "command.request_id"
    assert caller.servicer.num_steps == 1


async def test_command_outlives_a_caller_that_times_out(caller: Caller) -> None:
    caller.servicer.release.clear()
    assert (await refused(caller.step("slow", timeout_s=0.05))).reason == "DEADLINE_EXCEEDED"
    caller.servicer.release.set()
    assert (await caller.step("slow")).version == caller.servicer.num_steps == 1


async def test_lower_epoch_and_old_sequence_are_refused(caller: Caller) -> None:
    for epoch in (0, 6, 7, 6, 0):  # 0: a caller that only reads; looks of the old coordinator may come late
        caller.gate.look(epoch)
    assert (await caller.publish("a", 7, 3)).published_bytes == 3
    stale = await refused(caller.publish("b", 6, 9))
    assert isinstance(stale, StaleEpoch) and stale.metadata == {"epoch": "6", "current_epoch": "7"}
    assert isinstance(await refused(caller.publish("c", 7, 3)), StaleSequence)
    caller.gate.look(8)
    assert (await caller.publish("d", 8, 1)).published_bytes == 1


async def test_epoch_that_no_coordinator_has_shown_is_refused_and_changes_nothing(caller: Caller) -> None:
    assert isinstance(await refused(caller.publish("before any look", 1, 1)), StaleEpoch)
    caller.gate.look(7)
    for number, epoch in enumerate((8, 999, 2**40)):
        for sequence in (1, 2**40):
            wild = await refused(caller.publish(f"wild {number} {sequence}", epoch, sequence))
            assert isinstance(wild, StaleEpoch) and wild.metadata == {"epoch": str(epoch), "current_epoch": "7"}
    assert (caller.gate.epoch, caller.gate.sequence) == (0, 0)
    assert isinstance(await refused(caller.publish("late", 6, 9)), StaleEpoch)
    assert (await caller.publish("a", 7, 1)).published_bytes == 1


async def test_sequence_that_no_coordinator_comes_to_is_refused_and_changes_nothing(caller: Caller) -> None:
    caller.gate.look(7)
    first = await refused(caller.publish("wild at first", 7, 10**9))
    assert isinstance(first, InvalidArgument) and first.metadata["field"] == "command.sequence"
    # A service restarted late in an epoch first sees a large number.
    assert (await caller.publish("late in the epoch", 7, 5_000_000)).published_bytes == 5_000_000
    later = await refused(caller.publish("wild later", 7, 10**9))
    assert isinstance(later, InvalidArgument) and later.metadata["current_sequence"] == "5000000"
    assert (await caller.publish("next", 7, 5_000_004)).published_bytes == 5_000_004


async def test_refused_stage_and_data_command_do_not_shut_the_coordinator_out(caller: Caller) -> None:
    caller.gate.look(7)
    await caller.publish("a", 7, 3)
    caller.gate.look(999)
    assert isinstance(await refused(caller.publish("out of order", 999, 10**7)), StageOrder)
    assert isinstance(await refused(caller.publish("until its next look", 7, 4)), StaleEpoch)
    await caller.step("b", epoch=999)
    assert (caller.gate.epoch, caller.gate.sequence) == (7, 3)
    caller.gate.look(7)
    assert (await caller.publish("c", 7, 4)).published_bytes == 4


async def test_command_that_arrives_after_a_refused_later_one_is_not_carried_out(caller: Caller) -> None:
    caller.gate.look(7)
    assert isinstance(await refused(caller.publish("out of order", 7, 4)), StageOrder)
    assert isinstance(await refused(caller.publish("late", 7, 3)), StaleSequence)
    assert (await caller.publish("next", 7, 5)).published_bytes == 5
