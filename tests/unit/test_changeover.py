"""The sequence of stages and its undo: after a failure at any point the node is back at its start, with every step in the journal."""

from typing import Any, cast

import pytest

from tasuki.coordinator.journal import Journal
from tasuki.coordinator.node import Node
from tasuki.coordinator.operations import Update
from tasuki.v1.coordinator_pb2 import StageEvent
from tasuki.wire.errors import OutOfGpuMemory, PeerUnavailable, StageOrder
from tasuki.wire.stages import Phase, Service, Stage, StageStatus
from tests.unit.fake_node import TO_ROLLOUT, TO_TRAIN, TRAIN, acquire, events
from tests.unit.fake_services import FakeServices


async def test_acquire_runs_the_stages_in_order_and_tells_each(node: Node, services: FakeServices) -> None:
    told = await acquire(node, Phase.ROLLOUT)
    assert [(Stage.of(event.stage), StageStatus.of(event.status)) for event in told] == [
        *((stage, status) for stage in TO_ROLLOUT for status in (StageStatus.STARTED, StageStatus.DONE)),
        (None, StageStatus.DONE),
    ]
    assert services.asked == [("run", stage) for stage in TO_ROLLOUT]
    state = node.state()
    assert (Phase.of(state.phase), state.policy_version, state.num_changeovers) == (Phase.ROLLOUT, 0, 1)
    assert not state.changeover_id


async def test_acquire_of_the_phase_that_holds_tells_held_and_asks_nothing(node: Node, services: FakeServices) -> None:
    told = await acquire(node, Phase.TRAIN)
    assert [(Stage.of(event.stage), StageStatus.of(event.status)) for event in told] == [(None, StageStatus.HELD)]
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
    assert Phase.of(node.state().phase) is Phase.TRAIN
    assert node.state().last_error == "GPU_MEMORY: needs 12 GiB for weights, 9 GiB free"
    assert StageStatus.of(written.status) is StageStatus.FAILED
    stages = {Stage.of(event.stage): StageStatus.of(event.status) for event in written.stages}
    assert stages == {**dict.fromkeys(done, StageStatus.UNDONE), failing: StageStatus.FAILED}
    assert journal.unresolved() == []
    del services.fail[failing]
    await acquire(node, Phase.ROLLOUT)
    assert (Phase.of(node.state().phase), node.state().last_error) == (Phase.ROLLOUT, "")


async def test_failure_to_load_the_trainer_stays_in_the_middle_and_is_tried_again(node: Node, services: FakeServices) -> None:
    await acquire(node, Phase.ROLLOUT)
    services.fail[Stage.LOAD_TRAINER] = OutOfGpuMemory("no")
    with pytest.raises(OutOfGpuMemory):
        await acquire(node, Phase.TRAIN)
    state = node.state()
    assert (state.phase, Stage.of(state.stage)) == (0, Stage.PAUSE_WEIGHTS)
    assert Stage.of(state.next_stage) is Stage.LOAD_TRAINER
    services.fail.clear()
    await acquire(node, Phase.ROLLOUT)
    assert Phase.of(node.state().phase) is Phase.ROLLOUT


@pytest.mark.parametrize("stuck", [Stage.RESUME_WEIGHTS, Stage.OFFLOAD, Stage.LOAD_WEIGHTS])
async def test_failed_undo_is_journalled_and_the_stage_error_is_raised(
    stuck: Stage, node: Node, services: FakeServices, journal: Journal
) -> None:
    services.fail[Stage.RESUME_KV] = OutOfGpuMemory("no room for kv_cache")
    services.fail_undo[stuck] = PeerUnavailable("socket closed")
    with pytest.raises(OutOfGpuMemory, match="kv_cache"):
        await acquire(node, Phase.ROLLOUT)
    stages = {Stage.of(event.stage): event for event in journal.changeovers(limit=1)[0].stages}
    assert (StageStatus.of(stages[stuck].status), stages[stuck].error_reason) == (StageStatus.FAILED, "PEER_UNAVAILABLE")
    assert Stage.of(node.state().stage) is (await services.observe()).place()
    services.fail.clear()
    services.fail_undo.clear()
    await acquire(node, Phase.TRAIN)
    assert Phase.of(node.state().phase) is Phase.TRAIN


class DiskLog:
    """Rows that the journal has written, and events that watchers were told of with rows not on disk yet."""

    def __init__(self, journal: Journal) -> None:
        self.num_waits = 0
        """Commits that waited for the disk."""
        self.early: list[StageEvent] = []
        self._syncs, self._waiting = True, set[str]()
        journal._db.set_trace_callback(self._traced)

    def _traced(self, statement: str) -> None:
        if statement.startswith("PRAGMA synchronous"):
            self._syncs = statement.endswith("FULL")
        elif statement.startswith("INSERT") and self._syncs:
            self.num_waits += 1
            self._waiting.clear()
        elif statement.startswith("INSERT INTO results"):
            self._waiting.add("result")

    def full(self) -> bool:
        return False

    def put_nowait(self, update: Update | None) -> None:
        if update is not None and self._waiting:
            self.early.append(update.event)


async def test_a_result_is_on_disk_before_its_event_and_mostly_with_the_next_row(node: Node, journal: Journal) -> None:
    disk = DiskLog(journal)
    node.watchers._queues.add(cast(Any, disk))
    await acquire(node, Phase.ROLLOUT)
    # Five intents, the outcome, and the results before stages that may have to look for room.
    assert disk.num_waits == 8
    await acquire(node, Phase.TRAIN)
    assert disk.num_waits == 8 + 6
    for stage in TO_ROLLOUT:  # which make one changeover
        told = await events(node.run_stage(stage, f"hand {stage}"))
        assert (Stage.of(told[0].stage), StageStatus.of(told[1].status)) == (stage, StageStatus.DONE)
    assert disk.early == []
    written = [(StageStatus.of(one.status), len(one.stages)) for one in journal.changeovers(limit=9)]
    assert written == [(StageStatus.DONE, len(stages)) for stages in (TO_ROLLOUT, TO_TRAIN, TO_ROLLOUT)]
    assert (Phase.of(node.state().phase), node.state().policy_version) == (Phase.ROLLOUT, 0)
    assert journal.is_on_disk


@pytest.mark.parametrize("wrong", [stage for stage in Stage if stage is not Stage.LOAD_WEIGHTS])
async def test_stage_out_of_order_is_refused_and_no_service_is_asked(wrong: Stage, node: Node, services: FakeServices) -> None:
    with pytest.raises(StageOrder) as refused:
        await events(node.run_stage(wrong, "hand"))
    assert refused.value.metadata["allowed"] == Stage.LOAD_WEIGHTS
    assert services.asked == []
    await acquire(node, Phase.ROLLOUT)


async def test_acquire_turns_back_what_single_stages_began(node: Node, services: FakeServices, journal: Journal) -> None:
    for stage in TO_ROLLOUT[:3]:
        await events(node.run_stage(stage, f"hand {stage}"))
    await acquire(node, Phase.TRAIN)
    assert Phase.of(node.state().phase) is Phase.TRAIN
    assert services.asked[3:] == [("undo", Stage.SYNC), ("undo", Stage.RESUME_WEIGHTS), ("undo", Stage.LOAD_WEIGHTS)]
    assert [(StageStatus.of(one.status), one.error_reason) for one in journal.changeovers(limit=2)] == [
        (StageStatus.DONE, ""),
        (StageStatus.UNDONE, "INTERRUPTED"),
    ]


async def test_stages_that_their_caller_has_undone_are_no_failed_changeover(
    node: Node, services: FakeServices, journal: Journal
) -> None:
    await events(node.run_stage(Stage.LOAD_WEIGHTS, "hand"))
    services.stage[Service.TRAINER] = Stage.LOAD_TRAINER
    await acquire(node, Phase.ROLLOUT)
    assert [StageStatus.of(one.status) for one in journal.changeovers(limit=2)] == [StageStatus.DONE, StageStatus.UNDONE]


async def test_node_in_the_middle_of_nowhere_says_so_and_refuses(node: Node, services: FakeServices) -> None:
    await acquire(node, Phase.ROLLOUT)
    services.stage[Service.TRAINER] = Stage.LOAD_TRAINER
    with pytest.raises(StageOrder, match="restart the node"):
        await acquire(node, Phase.TRAIN)
    assert (Phase.of(node.state().phase), Stage.of(node.state().stage)) == (None, None)
    assert "restart the node" in node.state().last_error
