"""Callers of a changeover: one runs at a time, it outlives its callers, and each of them finds it again."""

import asyncio

import pytest

from tasuki.coordinator.node import Node
from tasuki.wire.errors import ChangeoverRunning, InvalidArgument, OutOfGpuMemory
from tasuki.wire.stages import Phase, Stage, StageStatus
from tests.unit.fake_node import ROLLOUT, TO_ROLLOUT, Hold, acquire, events
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


async def test_request_id_cannot_be_used_for_something_else(node: Node) -> None:
    await acquire(node, Phase.ROLLOUT, "mine")
    with pytest.raises(InvalidArgument, match="request_id"):
        node.acquire(Phase.TRAIN, "mine")


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
