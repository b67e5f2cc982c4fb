"""A request refused for lack of room runs when it is repeated under its request id; every other answer is repeated as it was."""

from pathlib import Path

import pytest

from tasuki.coordinator.journal import Journal
from tasuki.coordinator.node import Node
from tasuki.wire.errors import DiskFull, InvalidArgument, OutOfGpuMemory, TasukiError
from tasuki.wire.stages import Phase, Service, Stage
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
