"""The sequence and its undo: it fails at every point, the node is back where it was, and every step is in the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.coordinator.journal import Journal
from tasuki.coordinator.node import Node
from tasuki.coordinator.operation import Operation
from tasuki.coordinator.peers import Observed
from tasuki.coordinator.phases import HOLDS, RULES, Phase, Service, Stage, path
from tasuki.coordinator.records import StageEvent, Status
from tasuki.wire.errors import (
    ChangeoverRunning,
    DeadlineExceeded,
    DiskFull,
    EnginePoisoned,
    InvalidArgument,
    OutOfGpuMemory,
    PeerUnavailable,
    StageOrder,
    WeightsCorrupt,
)
from tests.unit.fake_services import FakeServices

TRAIN, ROLLOUT = HOLDS[Phase.TRAIN], HOLDS[Phase.ROLLOUT]
TO_ROLLOUT, TO_TRAIN = path(TRAIN, Phase.ROLLOUT), path(ROLLOUT, Phase.TRAIN)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.begin_epoch("boot-1")
    yield journal
    journal.close()


@pytest.fixture
def services() -> FakeServices:
    return FakeServices()


@pytest.fixture
async def node(journal: Journal, services: FakeServices) -> Node:
    return make_node(journal, services)


def make_node(journal: Journal, services: FakeServices) -> Node:
    return Node(
        journal,
        services,
        boot_id="boot-1",
        trainer_target="unix:/t",
        rollout_target="unix:/r",
        restart=services.restart,
        recovery_timeout_s=0.3,
    )


async def events(operation: Operation) -> list[StageEvent]:
    return [told.event async for told in operation.follow()]


async def acquire(node: Node, phase: Phase, request_id: str = "") -> list[StageEvent]:
    return await events(node.acquire(phase, request_id or f"to {phase} {len(node._operations)}"))


async def test_acquire_runs_the_stages_in_order_and_tells_each(node: Node, services: FakeServices) -> None:
    told = await acquire(node, Phase.ROLLOUT)
    assert [(event.stage, event.status) for event in told] == [
        *((stage, status) for stage in TO_ROLLOUT for status in (Status.STARTED, Status.DONE)),
        (None, Status.DONE),
    ]
    assert services.asked == [("run", stage) for stage in TO_ROLLOUT]
    state = node.state()
    assert (state.phase, state.policy_version, state.num_changeovers, state.changeover_id) == (Phase.ROLLOUT, 0, 1, "")


async def test_many_rounds_count_changeovers_and_versions(node: Node, services: FakeServices) -> None:
    for version in range(3):
        services.version = version
        await acquire(node, Phase.ROLLOUT)
        assert (services.served, node.state().policy_version) == (version, version)
        await acquire(node, Phase.TRAIN)
        assert (services.served, node.state().policy_version) == (None, version)
    assert node.state().num_changeovers == 6
    assert services.commands == [(1, sequence) for sequence in range(1, 28)]


async def test_acquire_of_the_phase_that_holds_tells_held_and_asks_nothing(node: Node, services: FakeServices) -> None:
    told = await acquire(node, Phase.TRAIN)
    assert [(event.stage, event.status) for event in told] == [(None, Status.HELD)]
    assert services.asked == []


@pytest.mark.parametrize("failing", TO_ROLLOUT)
async def test_failure_on_the_way_to_rollout_leads_back_to_train(
    failing: Stage, node: Node, services: FakeServices, journal: Journal
) -> None:
    services.fail[failing] = OutOfGpuMemory("needs 12 GiB for weights, 9 GiB free")
    with pytest.raises(OutOfGpuMemory, match="9 GiB free"):
        await acquire(node, Phase.ROLLOUT)
    done = TO_ROLLOUT[: TO_ROLLOUT.index(failing)]
    written = journal.changeovers(limit=1)[0]
    assert (await services.observe()).place() is TRAIN
    assert node.state().phase is Phase.TRAIN
    assert node.state().last_error == "GPU_MEMORY: needs 12 GiB for weights, 9 GiB free"
    assert written.status is Status.FAILED
    stages = {event.stage: event.status for event in written.stages()}
    assert stages == {**dict.fromkeys(done, Status.UNDONE), failing: Status.FAILED}
    assert journal.unresolved() == []
    del services.fail[failing]
    await acquire(node, Phase.ROLLOUT)
    assert (node.state().phase, node.state().last_error) == (Phase.ROLLOUT, "")


@pytest.mark.parametrize("failing", TO_TRAIN[:3])
async def test_failure_before_the_weights_are_gone_leads_back_to_rollout(
    failing: Stage, node: Node, services: FakeServices, journal: Journal
) -> None:
    await acquire(node, Phase.ROLLOUT)
    services.fail[failing] = OutOfGpuMemory("no")
    with pytest.raises(OutOfGpuMemory):
        await acquire(node, Phase.TRAIN)
    done = TO_TRAIN[: TO_TRAIN.index(failing)]
    assert (node.state().phase, services.served) == (Phase.ROLLOUT, 0)
    stages = {event.stage: event.status for event in journal.changeovers(limit=1)[0].stages()}
    assert stages == {**dict.fromkeys(done, Status.UNDONE), failing: Status.FAILED}


async def test_failure_to_load_the_trainer_stays_in_the_middle_and_is_tried_again(node: Node, services: FakeServices) -> None:
    await acquire(node, Phase.ROLLOUT)
    services.fail[Stage.LOAD_TRAINER] = OutOfGpuMemory("no")
    with pytest.raises(OutOfGpuMemory):
        await acquire(node, Phase.TRAIN)
    state = node.state()
    assert (state.phase, state.at, state.next_stage) == (None, Stage.PAUSE_WEIGHTS, Stage.LOAD_TRAINER)
    services.fail.clear()
    await acquire(node, Phase.ROLLOUT)
    assert node.state().phase is Phase.ROLLOUT


@pytest.mark.parametrize("was_done", [False, True])
@pytest.mark.parametrize("failing", TO_ROLLOUT)
async def test_lost_answer_on_the_way_to_rollout_is_taken_back_and_the_whole_tried_again(
    failing: Stage, was_done: bool, node: Node, services: FakeServices, journal: Journal
) -> None:
    services.fail_once[failing] = PeerUnavailable("socket closed")
    services.done_anyway = {failing} if was_done else set()
    await acquire(node, Phase.ROLLOUT)
    assert (node.state().phase, services.served) == (Phase.ROLLOUT, 0)
    tried = journal.changeovers(limit=9)
    assert [(one.status, one.error_reason) for one in tried] == [(Status.DONE, ""), (Status.FAILED, "PEER_UNAVAILABLE")]
    assert services.asked.count(("run", failing)) == 2
    assert journal.unresolved() == []


@pytest.mark.parametrize("was_done", [False, True])
@pytest.mark.parametrize("failing", TO_TRAIN)
async def test_lost_answer_on_the_way_to_train_is_tried_again(
    failing: Stage, was_done: bool, node: Node, services: FakeServices
) -> None:
    await acquire(node, Phase.ROLLOUT)
    services.fail_once[failing] = PeerUnavailable("socket closed")
    services.done_anyway = {failing} if was_done else set()
    await acquire(node, Phase.TRAIN)
    assert node.state().phase is Phase.TRAIN


@pytest.mark.parametrize("failing", [*TO_ROLLOUT, *TO_TRAIN])
async def test_stage_that_does_not_end_has_its_service_started_anew(failing: Stage, node: Node, services: FakeServices) -> None:
    if failing in TO_TRAIN:
        await acquire(node, Phase.ROLLOUT)
    target = Phase.TRAIN if failing in TO_TRAIN else Phase.ROLLOUT
    services.fail_once[failing] = DeadlineExceeded("600 s are over")
    await acquire(node, target)
    assert node.state().phase is target
    assert services.restarts == [RULES[failing].service]


async def test_service_that_is_lost_again_and_again_ends_the_changeover_with_its_error(
    node: Node, services: FakeServices, journal: Journal
) -> None:
    services.fail[Stage.SYNC] = PeerUnavailable("socket closed")
    with pytest.raises(PeerUnavailable, match="socket closed"):
        await acquire(node, Phase.ROLLOUT)
    assert [one.status for one in journal.changeovers(limit=9)] == [Status.FAILED] * 5
    assert node.state().phase is Phase.TRAIN


async def test_corrupt_weights_are_not_served_and_rollout_is_synced_anew_once_it_is_back(
    node: Node, services: FakeServices
) -> None:
    services.fail_once[Stage.SYNC] = WeightsCorrupt("lm_head.weight differs on rank 0")
    services.poisons = {Stage.SYNC}
    acquiring = asyncio.create_task(acquire(node, Phase.ROLLOUT))
    while "waiting for rollout to come back" not in node.state().last_error:
        await asyncio.sleep(0)
    state = node.state()
    assert (state.phase, state.policy_version, services.served) == (Phase.TRAIN, None, None)
    assert "lm_head.weight differs on rank 0; rollout is unusable until it is started anew: planted" in state.last_error
    services.kill(Service.ROLLOUT)
    services.start(Service.ROLLOUT)
    await acquiring
    assert (node.state().phase, services.served, node.state().last_error) == (Phase.ROLLOUT, 0, "")


async def test_poisoned_rollout_that_nobody_starts_anew_is_an_error_and_the_trainer_can_go_on(
    node: Node, services: FakeServices
) -> None:
    services.poison = "planted"
    with pytest.raises(EnginePoisoned, match=r"not been started anew in 0\.3 s: planted"):
        await acquire(node, Phase.ROLLOUT)
    await acquire(node, Phase.TRAIN)
    assert node.state().phase is Phase.TRAIN


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("stage", [*TO_ROLLOUT, *TO_TRAIN])
@pytest.mark.parametrize("service", list(Service))
async def test_service_that_dies_in_a_stage_is_waited_for_and_the_phase_reached(
    service: Service, stage: Stage, comes_back: bool, node: Node, services: FakeServices, journal: Journal
) -> None:
    if stage in TO_TRAIN:
        await acquire(node, Phase.ROLLOUT)
    target = Phase.TRAIN if stage in TO_TRAIN else Phase.ROLLOUT
    hold = Hold(services, stage)
    acquiring = asyncio.create_task(acquire(node, target))
    await hold.reached.wait()
    services.before_stage = lambda _: asyncio.sleep(0)
    services.kill(service)
    hold.release.set()
    if comes_back:
        await asyncio.sleep(0.02)
        services.start(service)
        await acquiring
        assert node.state().phase is target
        assert services.served == (0 if target is Phase.ROLLOUT else None)
    else:
        await asyncio.wait([acquiring])
        if acquiring.exception() is None:  # the other one was enough
            assert node.state().phase is target
        else:
            assert isinstance(acquiring.exception(), PeerUnavailable)
            assert service in str(acquiring.exception())
    assert journal.unresolved() == []


@pytest.mark.parametrize("at", [Stage.LOAD_TRAINER, Stage.LOAD_WEIGHTS])
async def test_trainer_leaves_the_gpus_before_an_engine_is_started_anew(
    at: Stage, node: Node, services: FakeServices, journal: Journal
) -> None:
    if at is Stage.LOAD_WEIGHTS:
        await events(node.run_stage(Stage.LOAD_WEIGHTS, "hand"))
    services.kill(Service.ROLLOUT)
    acquiring = asyncio.create_task(acquire(node, Phase.ROLLOUT))
    while services.stage[Service.TRAINER] is not Stage.OFFLOAD:
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    assert not acquiring.done()
    services.start(Service.ROLLOUT)
    await acquiring
    assert (node.state().phase, services.served) == (Phase.ROLLOUT, 0)
    assert journal.unfinished() == []


async def test_stage_that_was_cut_off_is_settled_before_the_trainer_makes_room(
    journal: Journal, services: FakeServices
) -> None:
    first, hold = make_node(journal, services), Hold(services, Stage.LOAD_WEIGHTS)
    first.acquire(Phase.ROLLOUT, "cut off")
    await hold.reached.wait()
    await first.stop()
    hold.release.set()
    services.kill(Service.ROLLOUT)
    journal.begin_epoch("boot-2")
    acquiring = asyncio.create_task(acquire(make_node(journal, services), Phase.ROLLOUT))
    while services.stage[Service.TRAINER] is not Stage.OFFLOAD:
        await asyncio.sleep(0)
    assert journal.unresolved() == []
    services.start(Service.ROLLOUT)
    await acquiring
    assert [event.error_reason for event in journal.changeovers(limit=9)[-1].events] == ["INTERRUPTED"]


async def test_training_goes_on_while_rollout_is_away(node: Node, services: FakeServices) -> None:
    services.kill(Service.ROLLOUT)
    told = await acquire(node, Phase.TRAIN)
    assert [event.status for event in told] == [Status.HELD]
    assert services.asked == []


async def test_trainer_that_was_started_anew_while_rollout_serves_is_loaded_at_the_next_changeover(
    node: Node, services: FakeServices
) -> None:
    await acquire(node, Phase.ROLLOUT)
    services.restart(Service.TRAINER, "")
    told = await acquire(node, Phase.ROLLOUT)
    assert [event.status for event in told] == [Status.HELD]
    await acquire(node, Phase.TRAIN)
    assert services.asked[-4:] == [("run", stage) for stage in TO_TRAIN]


@pytest.mark.parametrize("stuck", [Stage.RESUME_WEIGHTS, Stage.OFFLOAD, Stage.LOAD_WEIGHTS])
async def test_failed_undo_is_journalled_and_the_stage_error_is_raised(
    stuck: Stage, node: Node, services: FakeServices, journal: Journal
) -> None:
    services.fail[Stage.RESUME_KV] = OutOfGpuMemory("no room for kv_cache")
    services.fail_undo[stuck] = PeerUnavailable("socket closed")
    with pytest.raises(OutOfGpuMemory, match="kv_cache"):
        await acquire(node, Phase.ROLLOUT)
    stages = {event.stage: event for event in journal.changeovers(limit=1)[0].stages()}
    assert (stages[stuck].status, stages[stuck].error_reason) == (Status.FAILED, "PEER_UNAVAILABLE")
    assert node.state().at is (await services.observe()).place()
    services.fail.clear()
    services.fail_undo.clear()
    await acquire(node, Phase.TRAIN)
    assert node.state().phase is Phase.TRAIN


async def test_stages_run_by_hand_make_one_changeover(node: Node, services: FakeServices, journal: Journal) -> None:
    for stage in TO_ROLLOUT:
        told = await events(node.run_stage(stage, f"hand {stage}"))
        assert (told[0].stage, told[1].status) == (stage, Status.DONE)
    written = journal.changeovers(limit=9)
    assert [(one.target, one.status, len(one.stages())) for one in written] == [(Phase.ROLLOUT, Status.DONE, 5)]
    assert (node.state().phase, node.state().policy_version) == (Phase.ROLLOUT, 0)


async def test_changeover_by_hand_that_lost_its_rollout_is_not_the_one_that_leads_back(
    node: Node, services: FakeServices, journal: Journal
) -> None:
    for stage in TO_ROLLOUT[:4]:
        await events(node.run_stage(stage, f"hand {stage}"))
    services.restart(Service.ROLLOUT, "")
    await events(node.run_stage(Stage.LOAD_TRAINER, "hand back"))
    assert node.state().phase is Phase.TRAIN
    assert [(one.target, one.error_reason) for one in journal.changeovers(limit=9)] == [
        (Phase.TRAIN, ""),
        (Phase.ROLLOUT, "INTERRUPTED"),
    ]


@pytest.mark.parametrize("wrong", [stage for stage in Stage if stage is not Stage.LOAD_WEIGHTS])
async def test_stage_out_of_order_is_refused_and_no_service_is_asked(wrong: Stage, node: Node, services: FakeServices) -> None:
    with pytest.raises(StageOrder) as refused:
        await events(node.run_stage(wrong, "hand"))
    assert refused.value.metadata["allowed"] == Stage.LOAD_WEIGHTS
    assert services.asked == []
    await acquire(node, Phase.ROLLOUT)


async def test_acquire_turns_back_what_was_begun_by_hand(node: Node, services: FakeServices, journal: Journal) -> None:
    for stage in TO_ROLLOUT[:3]:
        await events(node.run_stage(stage, f"hand {stage}"))
    await acquire(node, Phase.TRAIN)
    assert node.state().phase is Phase.TRAIN
    assert services.asked[3:] == [("undo", Stage.SYNC), ("undo", Stage.RESUME_WEIGHTS), ("undo", Stage.LOAD_WEIGHTS)]
    assert [one.error_reason for one in journal.changeovers(limit=2)] == ["", "INTERRUPTED"]


async def test_acquire_finishes_what_was_begun_by_hand(node: Node, services: FakeServices) -> None:
    for stage in TO_ROLLOUT[:3]:
        await events(node.run_stage(stage, f"hand {stage}"))
    await acquire(node, Phase.ROLLOUT)
    assert (node.state().phase, node.state().policy_version) == (Phase.ROLLOUT, 0)
    assert services.asked == [("run", stage) for stage in TO_ROLLOUT]


class Hold:
    """Keeps a stage running until `release` is set; `reached` tells that it began."""

    def __init__(self, services: FakeServices, stage: Stage) -> None:
        self.reached, self.release = asyncio.Event(), asyncio.Event()
        self._stage = stage
        services.before_stage = self._wait

    async def _wait(self, stage: Stage) -> None:
        if stage is self._stage:
            self.reached.set()
            await self.release.wait()


@pytest.mark.parametrize("stage", RULES)
async def test_stage_that_ends_after_its_coordinator_is_waited_for(
    stage: Stage, journal: Journal, services: FakeServices
) -> None:
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
    second = make_node(journal, services)
    acquiring = asyncio.create_task(acquire(second, target, "again"))
    await asyncio.sleep(0.05)
    num_asked = len(services.asked)
    hold.release.set()
    await acquiring
    assert services.asked[num_asked - 1] == ("run", stage)  # nothing was sent before it had ended
    await acquire(second, Phase.ROLLOUT, "at last")
    assert (second.state().phase, second.state().policy_version, services.served) == (Phase.ROLLOUT, 1, 1)
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


async def test_acquire_goes_on_without_its_caller_and_is_found_again(node: Node, services: FakeServices) -> None:
    hold = Hold(services, Stage.SYNC)
    caller = asyncio.create_task(events(node.acquire(Phase.ROLLOUT, "mine")))
    await hold.reached.wait()
    caller.cancel()
    await asyncio.wait([caller])
    hold.release.set()
    again = await events(node.acquire(Phase.ROLLOUT, "mine"))
    other = await events(node.acquire(Phase.ROLLOUT, "mine"))
    assert [event.stage for event in again if event.status is Status.DONE] == [*TO_ROLLOUT, None]
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
    assert [one.state.at for one in told if one.event.status is Status.DONE] == [*TO_ROLLOUT, ROLLOUT]
    assert told[-1].state == node.state()


async def test_rollout_that_did_not_answer_while_the_weights_were_taken_back_is_put_to_sleep(
    node: Node, services: FakeServices
) -> None:
    services.stage = {Service.TRAINER: Stage.LOAD_TRAINER, Service.ROLLOUT: Stage.SYNC}
    await acquire(node, Phase.ROLLOUT)
    assert services.asked[:3] == [("undo", Stage.SYNC), ("undo", Stage.RESUME_WEIGHTS), ("undo", Stage.LOAD_WEIGHTS)]
    assert (node.state().phase, services.served) == (Phase.ROLLOUT, 0)


async def test_rollout_that_does_not_answer_after_an_undo_does_not_count_as_asleep(
    node: Node, services: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    await acquire(node, Phase.ROLLOUT)
    await events(node.run_stage(Stage.DRAIN, "hand"))
    services.restart(Service.TRAINER, "")
    answer, unheard = services.observe, [("undo", Stage.DRAIN)]

    async def observe() -> Observed:
        services.absent = {Service.ROLLOUT} if services.asked[-1:] == unheard else set()
        unheard[:] = [] if services.absent else unheard
        return await answer()

    monkeypatch.setattr(services, "observe", observe)
    await acquire(node, Phase.ROLLOUT, "again")
    assert node.state().phase is Phase.ROLLOUT
    assert services.asked == [*(("run", stage) for stage in (*TO_ROLLOUT, Stage.DRAIN)), ("undo", Stage.DRAIN)]


@pytest.mark.parametrize("phase", Phase)
async def test_rollout_that_was_only_silent_while_the_trainer_made_room_for_it_is_put_to_sleep(
    phase: Phase, node: Node, services: FakeServices, journal: Journal
) -> None:
    for stage in TO_ROLLOUT[:2]:
        await events(node.run_stage(stage, f"hand {stage}"))
    services.stage[Service.TRAINER] = Stage.OFFLOAD
    await acquire(make_node(journal, services), phase)
    assert (await services.observe()).place() is HOLDS[phase]
    assert ("undo", Stage.RESUME_WEIGHTS) in services.asked


async def test_changeover_whose_publication_was_not_heard_begins_anew(
    node: Node, services: FakeServices, journal: Journal
) -> None:
    await acquire(node, Phase.ROLLOUT)
    await acquire(node, Phase.TRAIN)
    services.version, services.done_anyway = 1, {Stage.LOAD_WEIGHTS}
    services.fail_once[Stage.LOAD_WEIGHTS] = PeerUnavailable("socket closed")
    with pytest.raises(PeerUnavailable):
        await events(node.run_stage(Stage.LOAD_WEIGHTS, "hand"))
    await acquire(node, Phase.ROLLOUT, "on")
    assert (services.served, node.state().policy_version) == (1, 1)


async def test_refusal_by_a_service_that_was_started_anew_is_a_loss_and_tried_again(
    node: Node, services: FakeServices, journal: Journal
) -> None:
    async def restart(stage: Stage) -> None:
        if stage is Stage.SYNC and len(services.restarts) == 0:
            services.restart(Service.ROLLOUT, "")

    services.before_stage = restart
    await acquire(node, Phase.ROLLOUT)
    assert [one.error_reason for one in journal.changeovers(limit=9)] == ["", "PEER_UNAVAILABLE"]


@pytest.mark.parametrize("at", [Stage.RESUME_KV, Stage.DRAIN, Stage.SYNC])
async def test_trainer_that_waits_for_rollout_to_leave_is_not_waited_for(
    at: Stage, node: Node, services: FakeServices, journal: Journal
) -> None:
    await acquire(node, Phase.ROLLOUT)
    services.stage[Service.ROLLOUT] = at
    services.kill(Service.TRAINER)
    acquiring = asyncio.create_task(acquire(node, Phase.ROLLOUT, "again"))
    if at is Stage.SYNC:
        while services.stage[Service.ROLLOUT] is not Stage.PAUSE_WEIGHTS:
            await asyncio.sleep(0)
        services.start(Service.TRAINER)
    await acquiring
    assert (node.state().phase, services.served) == (Phase.ROLLOUT, 0)


async def test_request_whose_last_try_ended_in_a_loss_is_carried_out_after_a_restart(
    journal: Journal, services: FakeServices
) -> None:
    services.fail[Stage.SYNC] = PeerUnavailable("socket closed")
    with pytest.raises(PeerUnavailable):
        await acquire(make_node(journal, services), Phase.ROLLOUT, "mine")
    services.fail.clear()
    journal.begin_epoch("boot-2")
    second = make_node(journal, services)
    told = await acquire(second, Phase.ROLLOUT, "mine")
    assert told[-1].status is Status.DONE
    journal.begin_epoch("boot-3")
    assert (await acquire(make_node(journal, services), Phase.ROLLOUT, "mine"))[-1].changeover_id == told[-1].changeover_id


async def test_node_in_the_middle_of_nowhere_says_so_and_refuses(node: Node, services: FakeServices) -> None:
    await acquire(node, Phase.ROLLOUT)
    services.stage[Service.TRAINER] = Stage.LOAD_TRAINER
    with pytest.raises(StageOrder, match="start the node anew"):
        await acquire(node, Phase.TRAIN)
    assert (node.state().phase, node.state().at) == (None, None)
    assert "start the node anew" in node.state().last_error


async def test_full_disk_under_the_journal_is_told_and_the_node_goes_on_when_there_is_room(
    node: Node, journal: Journal, services: FakeServices
) -> None:
    await acquire(node, Phase.ROLLOUT)
    num_pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {num_pages}")
    with pytest.raises(DiskFull, match="cannot be written .database or disk is full.*make room"):
        for number in range(100):
            await acquire(node, (Phase.TRAIN, Phase.ROLLOUT)[number % 2], f"{number}")
    num_asked = len(services.asked)
    with pytest.raises(DiskFull):
        await acquire(node, Phase.TRAIN, "still full")
        await acquire(node, Phase.ROLLOUT, "still full, too")
    assert len(services.asked) - num_asked <= 1
    journal._db.execute(f"PRAGMA max_page_count = {2**20}")
    for phase in (Phase.TRAIN, Phase.ROLLOUT):
        await acquire(node, phase, f"{phase} with room")
    assert (node.state().phase, services.served, journal.unresolved()) == (Phase.ROLLOUT, 0, [])


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
        await services.run(journal.unresolved()[0], published=b"0")
    with pytest.raises(asyncio.CancelledError):
        await events(operation)
    journal.begin_epoch("boot-2")
    second = make_node(journal, services)
    await second.recover()
    assert second.state().phase is (Phase.ROLLOUT if stage is Stage.DRAIN and not was_done else Phase.TRAIN)
    assert journal.unresolved() == []
    assert all(epoch == 2 for epoch, _ in services.commands[services.asked.index(("run", stage)) + 1 + was_done :])
    await events(second.acquire(target, "cut off"))
    assert second.state().phase is target
