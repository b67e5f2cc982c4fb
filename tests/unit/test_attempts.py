"""A request refused for lack of room runs when it is repeated under its request id; every other answer is repeated as it was."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tasuki.coordinator.audit.commands import audit_commands
from tasuki.coordinator.audit.history import History
from tasuki.coordinator.journal import Journal
from tasuki.coordinator.node import Node
from tasuki.memory.stages import Phase, Service, Stage
from tasuki.rpc.command_log import read_command_log
from tasuki.rpc.commands import CommandGate
from tasuki.v1 import trainer_pb2, types_pb2
from tasuki.wire.errors import DiskFull, InvalidArgument, OutOfGpuMemory, TasukiError, WrongPhase
from tests.unit.fake_node import make_node
from tests.unit.fake_services import FakeServices


async def error_of(node: Node, phase: Phase) -> TasukiError | None:
    try:
        async for _ in node.acquire(phase, "the same").follow():
            pass
    except TasukiError as error:
        return error
    return None


@pytest.mark.parametrize("has_restarted", [False, True])
async def test_a_changeover_that_had_no_room_is_carried_out_when_there_is(has_restarted: bool, tmp_path: Path) -> None:
    journal, services = Journal(tmp_path / "journal.sqlite"), FakeServices()
    journal.begin_epoch("boot-1")
    node = make_node(journal, services)
    journal._db.execute("PRAGMA query_only = 1")
    assert isinstance(await error_of(node, Phase.ROLLOUT), DiskFull)
    journal._db.execute("PRAGMA query_only = 0")
    services.fail_once[Stage.RESUME_KV] = DiskFull("no room for the result")
    assert isinstance(await error_of(node, Phase.ROLLOUT), DiskFull)
    if has_restarted:
        journal.begin_epoch("boot-2")
        node = make_node(journal, services)
    assert await error_of(node, Phase.ROLLOUT) is None
    assert services.stage[Service.ROLLOUT] is Stage.RESUME_KV
    num_asked = len(services.asked)
    assert await error_of(node, Phase.ROLLOUT) is None
    assert len(services.asked) == num_asked
    with pytest.raises(InvalidArgument, match="was used for"):
        node.acquire(Phase.TRAIN, "the same")


async def test_a_changeover_that_was_refused_otherwise_is_refused_again(tmp_path: Path) -> None:
    journal, services = Journal(tmp_path / "journal.sqlite"), FakeServices(fail_once={Stage.SYNC: OutOfGpuMemory("no room")})
    journal.begin_epoch("boot-1")
    node = make_node(journal, services)
    assert isinstance(await error_of(node, Phase.ROLLOUT), OutOfGpuMemory)
    assert isinstance(await error_of(node, Phase.ROLLOUT), OutOfGpuMemory)


async def test_a_command_that_a_full_disk_refused_is_carried_out_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tasuki.rpc")
    gate, errors, num_steps = CommandGate(), [DiskFull("no room"), WrongPhase("asleep")], 0

    async def step() -> trainer_pb2.OptimStepResponse:
        nonlocal num_steps
        if errors and request.command.request_id == "full":
            raise errors[0]
        if errors and request.command.request_id == "asleep":
            raise errors[1]
        num_steps += 1
        return trainer_pb2.OptimStepResponse(version=num_steps)

    for name in ("full", "asleep"):
        request = trainer_pb2.OptimStepRequest(command=types_pb2.CommandId(request_id=name))
        with pytest.raises(DiskFull if name == "full" else WrongPhase):
            await gate.once(request, step)
    errors.clear()
    with pytest.raises(WrongPhase):
        await gate.once(request, step)
    request = trainer_pb2.OptimStepRequest(command=types_pb2.CommandId(request_id="full"))
    other = trainer_pb2.OptimStepRequest(command=types_pb2.CommandId(request_id="full"), learning_rate=1.0)
    with pytest.raises(InvalidArgument, match="another request"):
        await gate.once(other, step)
    assert [(await gate.once(request, step)).version for _ in range(3)] == [1, 1, 1]
    (tmp_path / "trainer.log").write_text("\n".join(record.getMessage() for record in caplog.records))
    lives = {Service.TRAINER: read_command_log(tmp_path / "trainer.log")}
    assert [command.outcome for command in lives[Service.TRAINER][0].commands] == ["DISK_FULL", "WRONG_PHASE", "OK"]
    assert audit_commands(History((), (), (), (), ()), lives) is None
