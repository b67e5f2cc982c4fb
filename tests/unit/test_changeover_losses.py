"""A changeover that loses an answer or a service: it is retried, and the phase is reached."""

import asyncio

import pytest

from tasuki.coordinator.journal import Journal
from tasuki.coordinator.node import Node
from tasuki.coordinator.phases import Observed
from tasuki.wire.errors import DeadlineExceeded, EnginePoisoned, PeerUnavailable, WeightsCorrupt
from tasuki.wire.stages import HOLDS, RULES, Phase, Service, Stage, StageStatus
from tests.unit.fake_node import TO_ROLLOUT, TO_TRAIN, Hold, acquire, events, make_node
from tests.unit.fake_services import FakeServices


async def come_to(node: Node, stage: Stage) -> Phase:
    """Brings the node to the phase before `stage`. Returns the phase after it."""
    if stage in TO_TRAIN:
        await acquire(node, Phase.ROLLOUT)
    return Phase.TRAIN if stage in TO_TRAIN else Phase.ROLLOUT


@pytest.mark.parametrize("failing", [*TO_ROLLOUT, *TO_TRAIN])
async def test_stage_that_does_not_end_has_its_service_restarted(failing: Stage, node: Node, services: FakeServices) -> None:
    target = await come_to(node, failing)
    services.fail_once[failing] = DeadlineExceeded("600 s are over")
    await acquire(node, target)
    assert Phase.of(node.state().phase) is target
    assert services.restarts == [RULES[failing].service]


async def test_service_that_is_lost_again_and_again_ends_the_changeover_with_its_error(
    node: Node, services: FakeServices, journal: Journal
) -> None:
    services.fail[Stage.SYNC] = PeerUnavailable("socket closed")
    with pytest.raises(PeerUnavailable, match="socket closed"):
        await acquire(node, Phase.ROLLOUT)
    assert [StageStatus.of(one.status) for one in journal.changeovers(limit=9)] == [StageStatus.FAILED] * 5
    assert Phase.of(node.state().phase) is Phase.TRAIN


async def test_corrupt_weights_are_not_served_and_rollout_is_synced_again_once_it_is_back(node: Node, services: FakeServices):
    services.fail_once[Stage.SYNC] = WeightsCorrupt("lm_head.weight differs on rank 0")
    services.poisons = {Stage.SYNC}
    acquiring = asyncio.create_task(acquire(node, Phase.ROLLOUT))
    while "waiting for rollout to come back" not in node.state().last_error:
        await asyncio.sleep(0)
    state = node.state()
    assert (Phase.of(state.phase), state.HasField("policy_version"), services.served) == (Phase.TRAIN, False, None)
    assert "lm_head.weight differs on rank 0; rollout is unusable until it is restarted: planted" in state.last_error
    services.kill(Service.ROLLOUT)
    services.start(Service.ROLLOUT)
    await acquiring
    assert (Phase.of(node.state().phase), services.served, node.state().last_error) == (Phase.ROLLOUT, 0, "")


async def test_poisoned_rollout_that_nobody_restarts_is_an_error_and_the_trainer_can_go_on(
    journal: Journal, services: FakeServices
):
    node = make_node(journal, services)
    services.poison = "planted"
    with pytest.raises(EnginePoisoned, match=r"not been restarted in 0\.3 s: planted"):
        await acquire(node, Phase.ROLLOUT)
    await acquire(node, Phase.TRAIN)
    assert Phase.of(node.state().phase) is Phase.TRAIN


@pytest.mark.parametrize("stage", [*TO_ROLLOUT, *TO_TRAIN])
@pytest.mark.parametrize("service", list(Service))
async def test_service_that_dies_in_a_stage_and_stays_away_is_named_unless_the_other_one_is_enough(
    service: Service, stage: Stage, services: FakeServices, journal: Journal
) -> None:
    node = make_node(journal, services)
    target = await come_to(node, stage)
    hold = Hold(services, stage)
    acquiring = asyncio.create_task(acquire(node, target))
    await hold.reached.wait()
    services.before_stage = lambda _: asyncio.sleep(0)
    services.kill(service)
    hold.release.set()
    await asyncio.wait([acquiring])
    if (error := acquiring.exception()) is None:
        assert Phase.of(node.state().phase) is target
    else:
        assert isinstance(error, PeerUnavailable) and service in str(error)
    assert journal.unresolved() == []


@pytest.mark.parametrize(
    "how", ["is gone", "is gone at LOAD_WEIGHTS", "ends poisoned", "is gone and the trainer does not hear of it"]
)
async def test_trainer_leaves_the_gpus_before_an_engine_is_restarted(
    how: str, node: Node, services: FakeServices, journal: Journal
) -> None:
    if "LOAD_WEIGHTS" in how:
        await events(node.run_stage(Stage.LOAD_WEIGHTS, "hand"))
    if "hear" in how:
        services.fail_undo_once[Stage.LOAD_TRAINER] = PeerUnavailable("socket closed")
    if "poisoned" in how:
        services.poison = "planted"
    else:
        services.kill(Service.ROLLOUT)
    acquiring = asyncio.create_task(acquire(node, Phase.ROLLOUT))
    if "poisoned" in how:
        while "waiting for rollout to come back" not in node.state().last_error:
            await asyncio.sleep(0)
        services.kill(Service.ROLLOUT)
    while services.stage[Service.TRAINER] is not Stage.OFFLOAD:
        assert not acquiring.done()
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    assert not acquiring.done()
    services.start(Service.ROLLOUT)
    await acquiring
    assert (Phase.of(node.state().phase), services.served) == (Phase.ROLLOUT, 0)
    assert StageStatus.STARTED.number not in {one.status for one in journal.changeovers(limit=100)}


async def test_training_goes_on_while_rollout_is_away(node: Node, services: FakeServices) -> None:
    services.kill(Service.ROLLOUT)
    told = await acquire(node, Phase.TRAIN)
    assert [StageStatus.of(event.status) for event in told] == [StageStatus.HELD]
    assert services.asked == []


async def test_trainer_that_was_restarted_while_rollout_serves_is_loaded_at_the_next_changeover(
    node: Node, services: FakeServices
) -> None:
    await acquire(node, Phase.ROLLOUT)
    services.restart(Service.TRAINER, "")
    told = await acquire(node, Phase.ROLLOUT)
    assert [StageStatus.of(event.status) for event in told] == [StageStatus.HELD]
    await acquire(node, Phase.TRAIN)
    assert services.asked[-4:] == [("run", stage) for stage in TO_TRAIN]


async def test_stage_commands_back_to_train_after_a_lost_rollout_are_another_changeover(
    node: Node, services: FakeServices, journal: Journal
) -> None:
    for stage in TO_ROLLOUT[:4]:
        await events(node.run_stage(stage, f"hand {stage}"))
    services.restart(Service.ROLLOUT, "")
    await events(node.run_stage(Stage.LOAD_TRAINER, "hand back"))
    assert Phase.of(node.state().phase) is Phase.TRAIN
    assert [(Phase.of(one.target), one.error_reason) for one in journal.changeovers(limit=9)] == [
        (Phase.TRAIN, ""),
        (Phase.ROLLOUT, "INTERRUPTED"),
    ]


async def test_rollout_that_did_not_answer_while_the_weights_were_taken_back_is_put_to_sleep(
    node: Node, services: FakeServices
) -> None:
    services.stage = {Service.TRAINER: Stage.LOAD_TRAINER, Service.ROLLOUT: Stage.SYNC}
    await acquire(node, Phase.ROLLOUT)
    assert services.asked[:3] == [("undo", Stage.SYNC), ("undo", Stage.RESUME_WEIGHTS), ("undo", Stage.LOAD_WEIGHTS)]
    assert (Phase.of(node.state().phase), services.served) == (Phase.ROLLOUT, 0)


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
    assert Phase.of(node.state().phase) is Phase.ROLLOUT
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


async def test_changeover_whose_publication_was_not_heard_begins_again(node: Node, services: FakeServices, journal: Journal):
    await acquire(node, Phase.ROLLOUT)
    await acquire(node, Phase.TRAIN)
    services.version, services.done_anyway = 1, {Stage.LOAD_WEIGHTS}
    services.fail_once[Stage.LOAD_WEIGHTS] = PeerUnavailable("socket closed")
    with pytest.raises(PeerUnavailable):
        await events(node.run_stage(Stage.LOAD_WEIGHTS, "hand"))
    await acquire(node, Phase.ROLLOUT, "on")
    assert (services.served, node.state().policy_version) == (1, 1)


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
    assert (Phase.of(node.state().phase), services.served) == (Phase.ROLLOUT, 0)
