"""A restarted coordinator: it determines the node's state, and carries out what was requested."""

import asyncio

import pytest

from tasuki.coordinator.journal import Journal
from tasuki.wire.errors import PeerUnavailable, StaleEpoch
from tasuki.wire.stages import RULES, Phase, Service, Stage, StageStatus
from tests.unit.fake_node import TO_ROLLOUT, TO_TRAIN, Hold, acquire, events, make_node
from tests.unit.fake_services import FakeServices


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


@pytest.mark.parametrize("was_done", [False, True])
@pytest.mark.parametrize("stage", [*TO_ROLLOUT[:4], *TO_TRAIN])
async def test_coordinator_that_died_in_a_stage_finds_the_node_and_brings_it_to_train(
    stage: Stage, was_done: bool, journal: Journal, services: FakeServices
) -> None:
    first = make_node(journal, services)
    if stage in TO_TRAIN:
        await acquire(first, Phase.ROLLOUT)
    target = Phase.TRAIN if stage in TO_TRAIN else Phase.ROLLOUT
    hold = Hold(services, stage)
    operation = first.acquire(target, "cut off")
    await hold.reached.wait()
    await first.stop()
    hold.release.set()
    if was_done:
        await services.carry_out(journal.unresolved()[0], published=b"0")
    with pytest.raises(asyncio.CancelledError):
        await events(operation)
    journal.begin_epoch("boot-2")
    second = make_node(journal, services)
    await second.recover()
    assert Phase.of(second.state().phase) is (Phase.ROLLOUT if stage is Stage.DRAIN and not was_done else Phase.TRAIN)
    assert journal.unresolved() == []
    assert all(epoch == 2 for epoch, _ in services.commands[services.asked.index(("run", stage)) + 1 + was_done :])
    await events(second.acquire(target, "cut off"))
    assert Phase.of(second.state().phase) is target


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
