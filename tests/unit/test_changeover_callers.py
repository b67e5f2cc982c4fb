"""Callers of a changeover, which one runs at a time and outlives, and a restarted coordinator, which finds the node."""

import asyncio

import pytest

from tasuki.coordinator.journal import Journal
from tasuki.coordinator.node import Node
from tasuki.wire.errors import ChangeoverRunning, DiskFull, InvalidArgument, OutOfGpuMemory, PeerUnavailable, StaleEpoch
from tasuki.wire.stages import RULES, Phase, Service, Stage, StageStatus
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


async def test_stage_that_was_cut_off_is_settled_before_the_trainer_makes_room(journal: Journal, services: FakeServices):
    first, hold = make_node(journal, services), Hold(services, Stage.LOAD_WEIGHTS)
    first.acquire(Phase.ROLLOUT, "cut off")
    await hold.reached.wait()
    await first.stop()
    hold.release.set()
    services.kill(Service.ROLLOUT)
    journal.begin_epoch("boot-2")
    acquiring = asyncio.create_task(acquire(make_node(journal, services, recovery_timeout_s=60.0), Phase.ROLLOUT))
    while services.stage[Service.TRAINER] is not Stage.OFFLOAD:
        await asyncio.sleep(0)
    assert journal.unresolved() == []
    services.start(Service.ROLLOUT)
    await acquiring
    assert [event.error_reason for event in journal.events(journal.changeovers(limit=9)[-1].changeover_id)] == ["INTERRUPTED"]


@pytest.mark.parametrize("stage", RULES)
async def test_stage_that_ends_after_its_coordinator_is_waited_for(stage: Stage, journal: Journal, services: FakeServices):
    services.outlives_callers = True
    first, target = make_node(journal, services), Phase.ROLLOUT if stage in TO_ROLLOUT else Phase.TRAIN
    await acquire(first, Phase.ROLLOUT)
    await acquire(first, Phase.TRAIN)
    services.version = 1
    if target is Phase.TRAIN:
        await acquire(first, Phase.ROLLOUT)
    hold = Hold(services, stage)
    first.acquire(target, "cut off")
    await hold.reached.wait()
    await first.stop()
    journal.begin_epoch("boot-2")
    second = make_node(journal, services, recovery_timeout_s=60.0)
    acquiring = asyncio.create_task(acquire(second, target, "again"))
    await asyncio.sleep(0.05)
    num_asked = len(services.asked)
    hold.release.set()
    await acquiring
    assert services.asked[num_asked - 1] == ("run", stage)  # nothing was sent before it ended
    await acquire(second, Phase.ROLLOUT, "at last")
    assert (Phase.of(second.state().phase), second.state().policy_version, services.served) == (Phase.ROLLOUT, 1, 1)
    assert journal.unresolved() == []


async def test_stage_that_never_ends_is_told(journal: Journal, services: FakeServices) -> None:
    services.outlives_callers = True
    first, hold = make_node(journal, services), Hold(services, Stage.OFFLOAD)
    first.acquire(Phase.ROLLOUT, "cut off")
    await hold.reached.wait()
    await first.stop()
    journal.begin_epoch("boot-2")
    with pytest.raises(PeerUnavailable, match="trainer still carries out a stage"):
        await acquire(make_node(journal, services), Phase.ROLLOUT)
    hold.release.set()


async def test_request_whose_last_try_ended_in_a_loss_is_carried_out_after_a_restart(journal: Journal, services: FakeServices):
    services.fail[Stage.SYNC] = PeerUnavailable("socket closed")
    with pytest.raises(PeerUnavailable):
        await acquire(make_node(journal, services), Phase.ROLLOUT, "mine")
    services.fail.clear()
    journal.begin_epoch("boot-2")
    second = make_node(journal, services)
    told = await acquire(second, Phase.ROLLOUT, "mine")
    assert StageStatus.of(told[-1].status) is StageStatus.DONE
    journal.begin_epoch("boot-3")
    assert (await acquire(make_node(journal, services), Phase.ROLLOUT, "mine"))[-1].changeover_id == told[-1].changeover_id


async def test_a_service_that_took_the_epoch_of_no_coordinator_is_restarted_within_the_changeover(
    journal: Journal, services: FakeServices
) -> None:
    services.fail_once[Stage.LOAD_WEIGHTS] = StaleEpoch("epoch 1 is over: this service has seen 20", epoch=1, current_epoch=20)
    delayed = services.restart

    def later(service: Service, cause: str) -> None:
        asyncio.get_running_loop().call_later(0.1, delayed, service, cause)

    services.restart = later
    told = await acquire(make_node(journal, services, recovery_timeout_s=60.0), Phase.ROLLOUT)
    assert services.restarts == [Service.TRAINER]
    assert told[-1].status == StageStatus.DONE.number
