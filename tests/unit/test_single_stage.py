"""A stage command sent past the coordinator does not block the node for good, and is detected."""

import asyncio
from pathlib import Path

import pytest

from tasuki.coordinator.command_log import audit_commands
from tasuki.coordinator.history import Invariant, read_history
from tasuki.coordinator.replay import audit
from tasuki.v1 import memory_pb2, trainer_pb2, types_pb2
from tasuki.wire.errors import StageOrder, StaleSequence, TasukiError
from tasuki.wire.stages import Phase
from tests.unit.simulated_node import SimulatedNode
from tests.unit.virtual_time import VirtualTimeLoop


def manual(epoch: int, sequence: int) -> types_pb2.CommandId:
    return types_pb2.CommandId(epoch=epoch, sequence=sequence, request_id="manual")


async def round_trip(node: SimulatedNode, name: str) -> list[TasukiError | None]:
    return [await node.acquire(phase, f"{phase} {name}") for phase in (Phase.ROLLOUT, Phase.TRAIN)]


def test_after_a_number_that_somebody_else_took_the_coordinator_goes_on_and_the_audit_names_it(tmp_path: Path) -> None:
    async def live() -> None:
        node = SimulatedNode(tmp_path, fault=lambda: None, waits_for_room=False)
        assert await round_trip(node, "first") == [None, None]
        assert node.trainer is not None
        await node.trainer.PublishWeights(trainer_pb2.PublishWeightsRequest(command=manual(1, 5000)))
        refused = await node.acquire(Phase.TRAIN, "back")
        assert isinstance(refused, StaleSequence)
        assert await node.acquire(Phase.TRAIN, "back again") is None
        assert await round_trip(node, "second") == [None, None]
        history, lives = read_history(tmp_path / "journal.sqlite"), node.logs.read(tmp_path)
        node.logs.close()
        assert max(intent.sequence for intent in history.stages) > 5000
        violation = audit(history).violation or audit_commands(history, lives)
        assert violation is not None
        assert violation.invariant in (Invariant.ORIGIN, Invariant.AS_ASKED)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(live())


def test_a_number_that_was_taken_by_a_refused_stage_is_passed_over_and_the_audit_is_clean(tmp_path: Path) -> None:
    async def live() -> None:
        node = SimulatedNode(tmp_path, fault=lambda: None, waits_for_room=False)
        assert node.trainer is not None
        assert await round_trip(node, "first") == [None, None]
        wrong = memory_pb2.ResumeRequest(command=manual(1, 5000), stage=types_pb2.STAGE_LOAD_TRAINER)
        with pytest.raises(StageOrder):
            await node.trainer.Resume(wrong)
        assert isinstance((await round_trip(node, "refused"))[0], StaleSequence)
        assert await round_trip(node, "second") == [None, None]
        await node.close()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(live())
