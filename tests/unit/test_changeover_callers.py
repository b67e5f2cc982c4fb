"""Callers of a changeover: one runs at a time, it outlives its callers, and each of them finds it again."""

import asyncio

import pytest

from tasuki.coordinator.journal import Journal
from tasuki.coordinator.node import Node
from tasuki.wire.errors import ChangeoverRunning, DiskFull, InvalidArgument, OutOfGpuMemory
from tasuki.wire.stages import Phase, Service, Stage, StageStatus
from tests.unit.fake_node import ROLLOUT, TO_ROLLOUT, Hold, acquire, events, make_node
from tests.unit.fake_services import FakeServices


async def test_acquire_goes_on_without_its_caller_and_is_found_again(node: Node, services: FakeServices) -> None:
    hold = Hold(services, Stage.SYNC)
    caller = asyncio.create_task(events(node.acquire(Phase.ROLLOUT, "mine")))
    await hold.reached.wait()
    caller.cancel()
    await asyncio.wait([caller])
    hold.release.set()
    again = await events(node.acquire(Phase.ROLLOUT, "mine"))
    other = await events(node.acquire(Phase.ROLLOUT, "mine"))
    assert [Stage.of(event.stage) for event in again if StageStatus.of(event.status) is StageStatus.DONE] == [*TO_ROLLOUT, None]
    assert again == other
    assert services.asked.count(("run", Stage.SYNC)) == 1


async def test_acquire_of_the_other_phase_is_refused_while_one_runs(node: Node, services: FakeServices) -> None:
    hold = Hold(services, Stage.SYNC)
    first = asyncio.create_task(acquire(node, Phase.ROLLOUT))
    await hold.reached.wait()
    with pytest.raises(ChangeoverRunning) as refused:
        node.acquire(Phase.TRAIN, "other")
    assert refused.value.metadata == {"changeover_id": "c000001"}
    with pytest.raises(ChangeoverRunning):
        node.run_stage(Stage.OFFLOAD, "hand")
    joined = node.acquire(Phase.ROLLOUT, "the same phase")
    hold.release.set()
    assert await events(joined) == await first
    assert len(services.asked) == len(TO_ROLLOUT)


async def test_failed_operation_gives_its_error_again(node: Node, services: FakeServices) -> None:
    services.fail[Stage.OFFLOAD] = OutOfGpuMemory("no")
    for _ in range(2):
        with pytest.raises(OutOfGpuMemory):
            await acquire(node, Phase.ROLLOUT, "mine")
    assert services.asked.count(("run", Stage.OFFLOAD)) == 1


async def test_watchers_see_every_event_with_the_state_after_it(node: Node) -> None:
    with node.watchers.watching() as queue:
        await acquire(node, Phase.ROLLOUT)
        told = [queue.get_nowait() for _ in range(queue.qsize())]
    assert [Stage.of(one.state.stage) for one in told if StageStatus.of(one.event.status) is StageStatus.DONE] == [
        *TO_ROLLOUT,
        ROLLOUT,
    ]
    assert told[-1].state == node.state()


@pytest.mark.parametrize("has_restarted", [False, True])
async def test_a_changeover_that_had_no_room_on_disk_is_carried_out_when_there_is(
    has_restarted: bool, node: Node, services: FakeServices, journal: Journal
) -> None:
    journal._db.execute("PRAGMA query_only = 1")
    with pytest.raises(DiskFull):
        await acquire(node, Phase.ROLLOUT, "the same")
    journal._db.execute("PRAGMA query_only = 0")
    services.fail_once[Stage.RESUME_KV] = DiskFull("no room for the result")
    with pytest.raises(DiskFull):
        await acquire(node, Phase.ROLLOUT, "the same")
    if has_restarted:
        journal.begin_epoch("boot-2")
        node = make_node(journal, services)
    await acquire(node, Phase.ROLLOUT, "the same")
    assert services.stage[Service.ROLLOUT] is Stage.RESUME_KV
    num_asked = len(services.asked)
    await acquire(node, Phase.ROLLOUT, "the same")
    assert len(services.asked) == num_asked
    with pytest.raises(InvalidArgument, match="request_id: .* was used for"):
        node.acquire(Phase.TRAIN, "the same")
