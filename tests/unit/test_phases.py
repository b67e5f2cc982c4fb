"""The table of stages, against an independent model of the two services."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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
from tasuki.wire.stages import HOLDS, NEXT, RULES, Phase, Service, Stage, stages_of

TO_ROLLOUT = (Stage.LOAD_WEIGHTS, Stage.RESUME_WEIGHTS, Stage.SYNC, Stage.OFFLOAD, Stage.RESUME_KV)
TO_TRAIN = (Stage.DRAIN, Stage.PAUSE_KV, Stage.PAUSE_WEIGHTS, Stage.LOAD_TRAINER)
stages = st.sampled_from(Stage)


def test_paths_between_the_phases_are_the_order_of_the_design() -> None:
    assert path(HOLDS[Phase.TRAIN], Phase.ROLLOUT) == TO_ROLLOUT
    assert path(HOLDS[Phase.ROLLOUT], Phase.TRAIN) == TO_TRAIN
    assert [path(HOLDS[phase], phase) for phase in Phase] == [(), ()]
    assert stages_of(Service.TRAINER) == (Stage.LOAD_WEIGHTS, Stage.OFFLOAD, Stage.LOAD_TRAINER)


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


TRAINER = {
    ("LOADED", Stage.LOAD_WEIGHTS): "PUBLISHED",
    ("PUBLISHED", Stage.OFFLOAD): "OFFLOADED",
    ("OFFLOADED", Stage.LOAD_TRAINER): "LOADED",
}
ROLLOUT = {
    ("ASLEEP", Stage.RESUME_WEIGHTS): "EMPTY",
    ("EMPTY", Stage.SYNC): "SYNCED",
    ("SYNCED", Stage.RESUME_KV): "SERVING",
    ("SERVING", Stage.DRAIN): "DRAINED",
    ("DRAINED", Stage.PAUSE_KV): "NO_KV",
    ("NO_KV", Stage.PAUSE_WEIGHTS): "ASLEEP",
}
UNDO = {Stage.LOAD_WEIGHTS: "LOADED", Stage.OFFLOAD: "LOADED", Stage.RESUME_WEIGHTS: "ASLEEP", Stage.DRAIN: "SERVING"}


class Services:
    """Trainer and rollout by their own rules: the stages each accepts next, and the memory that these leave mapped."""

    def __init__(self) -> None:
        self.trainer, self.rollout = "LOADED", "ASLEEP"
        self.trainer_stage: Stage | None = None
        self.rollout_stage: Stage | None = None

    def run(self, stage: Stage) -> None:
        if RULES[stage].service is Service.TRAINER:
            self.trainer, self.trainer_stage = TRAINER[self.trainer, stage], stage
        else:
            self.rollout, self.rollout_stage = ROLLOUT[self.rollout, stage], stage

    def undo(self, stage: Stage) -> None:
        if stage not in UNDO:
            return
        if RULES[stage].service is Service.TRAINER:
            self.trainer, self.trainer_stage = UNDO[stage], Stage.LOAD_TRAINER
        else:
            self.rollout = UNDO[stage]
            self.rollout_stage = Stage.PAUSE_WEIGHTS if self.rollout == "ASLEEP" else Stage.RESUME_KV

    @property
    def mapped(self) -> set[str]:
        trainer = set() if self.trainer == "OFFLOADED" else {"trainer"}
        weights = set() if self.rollout == "ASLEEP" else {"weights"}
        return trainer | weights | ({"kv_cache"} if self.rollout in ("SERVING", "DRAINED") else set())


class AnySequenceOfStages(RuleBasedStateMachine):
    """Requests stages in any order, allowed or refused by the table, and undoes them at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.at = HOLDS[Phase.TRAIN]
        self.services = Services()
        self.version, self.published, self.received, self.committed = 0, -1, -1, -1

    @rule(stage=stages)
    def ask_for_a_stage(self, stage: Stage) -> None:
        if stage is not NEXT[self.at]:
            with pytest.raises(StageOrder) as refused:
                advance(self.at, stage)
            assert refused.value.metadata == {"stage": stage, "after": self.at, "allowed": NEXT[self.at]}
            return
        self.at = advance(self.at, stage)
        self.services.run(stage)
        if stage is Stage.LOAD_WEIGHTS:
            self.published = self.version
        if stage is Stage.SYNC:
            self.received = self.published
        if stage is Stage.RESUME_KV:
            assert self.received >= self.committed, "versions only grow"
            self.committed = self.received

    @rule()
    def go_on_to_the_next_stage(self) -> None:
        self.ask_for_a_stage(NEXT[self.at])

    @precondition(lambda self: phase_of(self.at) is Phase.TRAIN)
    @rule()
    def make_an_optimizer_step(self) -> None:
        assert self.services.trainer == "LOADED"
        self.version += 1

    @precondition(lambda self: undo_path(since_phase(self.at)) != ())
    @rule()
    def take_everything_back(self) -> None:
        done = since_phase(self.at)
        for stage in undo_path(done):
            self.services.undo(stage)
            found = ring_position(trainer=self.services.trainer_stage, rollout=self.services.rollout_stage)
            assert found is not None, "a coordinator that dies here finds the node again"
        self.at = RULES[done[0]].after
        assert phase_of(self.at) is not None

    @invariant()
    def the_services_tell_the_stage_of_the_node(self) -> None:
        assert ring_position(trainer=self.services.trainer_stage, rollout=self.services.rollout_stage) is self.at

    @invariant()
    def trainer_and_kv_cache_are_never_mapped_together(self) -> None:
        assert not {"trainer", "kv_cache"} <= self.services.mapped

    @invariant()
    def nothing_is_generated_while_no_version_is_committed(self) -> None:
        assert self.services.rollout != "SERVING" or self.committed >= 0

    @invariant()
    def each_phase_has_its_holder(self) -> None:
        expected = {Phase.TRAIN: ("LOADED", "ASLEEP"), Phase.ROLLOUT: ("OFFLOADED", "SERVING")}
        phase = phase_of(self.at)
        assert phase is None or (self.services.trainer, self.services.rollout) == expected[phase]


test_any_sequence_of_stages_keeps_the_invariants = AnySequenceOfStages.TestCase


def test_a_number_of_a_message_is_never_silently_another_phase() -> None:
    state = NodeState(phase=PHASE_TRAIN)
    for compare in (lambda: state.phase == Phase.TRAIN, lambda: state.phase != Phase.TRAIN):
        with pytest.raises(TypeError, match=r"compare Phase\.of\(1\) with Phase\.TRAIN"):
            compare()
    assert Phase.of(state.phase) == Phase.TRAIN == "TRAIN"
    assert {Phase.TRAIN: "held"}["TRAIN"] == "held"
