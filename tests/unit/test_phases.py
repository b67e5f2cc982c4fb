"""The table of stages, and enums of the wire."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.coordinator.phases import (
    advance,
    leads_to,
    lost_weights,
    path,
    phase_of,
    ring_position,
    since_phase,
    turns_back,
    undo_path,
)
from tasuki.v1.coordinator_pb2 import NodeState
from tasuki.v1.types_pb2 import PHASE_TRAIN
from tasuki.wire.errors import StageOrder
from tasuki.wire.stages import HOLDS, NEXT, Phase, Service, Stage, stages_of

TO_ROLLOUT = (Stage.LOAD_WEIGHTS, Stage.RESUME_WEIGHTS, Stage.SYNC, Stage.OFFLOAD, Stage.RESUME_KV)
TO_TRAIN = (Stage.DRAIN, Stage.PAUSE_KV, Stage.PAUSE_WEIGHTS, Stage.LOAD_TRAINER)
stages = st.sampled_from(Stage)


def test_paths_between_the_phases_are_the_order_of_the_design() -> None:
    assert path(HOLDS[Phase.TRAIN], Phase.ROLLOUT) == TO_ROLLOUT
    assert path(HOLDS[Phase.ROLLOUT], Phase.TRAIN) == TO_TRAIN
    assert [path(HOLDS[phase], phase) for phase in Phase] == [(), ()]
    assert stages_of(Service.TRAINER) == (Stage.LOAD_WEIGHTS, Stage.OFFLOAD, Stage.LOAD_TRAINER)


@given(at=stages, stage=stages)
def test_only_the_next_stage_is_let_through(at: Stage, stage: Stage) -> None:
    if stage is NEXT[at]:
        assert advance(at, stage) is stage
        return
    with pytest.raises(StageOrder) as refused:
        advance(at, stage)
    assert refused.value.metadata == {"stage": stage, "after": at, "allowed": NEXT[at]}


@given(at=stages, to=st.sampled_from(Phase))
def test_path_always_arrives_and_passes_every_stage_at_most_once(at: Stage, to: Phase) -> None:
    way = path(at, to)
    for stage in way:
        at = advance(at, stage)
    assert phase_of(at) is to
    assert len(set(way)) == len(way)


def test_undo_of_a_finished_half_takes_rollout_back_before_the_trainer() -> None:
    assert undo_path(TO_ROLLOUT[:4]) == (Stage.SYNC, Stage.RESUME_WEIGHTS, Stage.OFFLOAD, Stage.LOAD_WEIGHTS)
    assert undo_path(TO_TRAIN[:2]) == (Stage.PAUSE_KV, Stage.DRAIN)


def test_turning_back_leads_to_the_phase_that_held_last_except_from_paused_weights() -> None:
    assert undo_path(TO_TRAIN[:3]) == ()
    assert [stage for stage in Stage if turns_back(stage, Phase.TRAIN)] == list(TO_ROLLOUT[:4])
    assert [stage for stage in Stage if turns_back(stage, Phase.ROLLOUT)] == list(TO_TRAIN[:2])


@given(at=stages)
def test_stages_since_the_last_phase_lead_to_the_stage_of_the_node(at: Stage) -> None:
    done = since_phase(at)
    assert (done == ()) == (phase_of(at) is not None)
    assert path(done[0] if done else at, leads_to(at))[-1] is HOLDS[leads_to(at)]
    assert done == () or done[-1] is at


def test_fresh_services_are_at_train_and_those_that_do_not_fit_together_nowhere() -> None:
    assert ring_position(trainer=None, rollout=None) is HOLDS[Phase.TRAIN]
    assert ring_position(trainer=Stage.LOAD_TRAINER, rollout=Stage.RESUME_KV) is None


@pytest.mark.parametrize("rollout", stages_of(Service.ROLLOUT))
def test_trainer_that_was_restarted_leaves_the_node_where_rollout_is(rollout: Stage) -> None:
    is_asleep = rollout is Stage.PAUSE_WEIGHTS
    assert ring_position(trainer=None, rollout=rollout) is (Stage.LOAD_TRAINER if is_asleep else rollout)
    assert lost_weights(trainer=None, rollout=rollout) is (rollout in (Stage.RESUME_WEIGHTS, Stage.SYNC))
    assert not lost_weights(trainer=Stage.LOAD_WEIGHTS, rollout=rollout)


def test_a_number_of_a_message_is_never_silently_another_phase() -> None:
    state = NodeState(phase=PHASE_TRAIN)
    for compare in (lambda: state.phase == Phase.TRAIN, lambda: state.phase != Phase.TRAIN):
        with pytest.raises(TypeError, match=r"compare Phase\.of\(1\) with Phase\.TRAIN"):
            compare()
    assert Phase.of(state.phase) == Phase.TRAIN == "TRAIN"
    assert {Phase.TRAIN: "held"}["TRAIN"] == "held"
