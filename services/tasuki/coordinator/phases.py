"""The ring of stages: where a node is, what may come next, and the way back. Pure: no I/O, no proto.

A node is *at* the stage that was completed last: at LOAD_TRAINER it is in phase TRAIN, at RESUME_KV in phase ROLLOUT,
elsewhere in the middle of a changeover. The rows of the ring are in memory/stages.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.memory.stages import NEXT, RULES, Phase, Service, Stage, last_of
from tasuki.wire.errors import StageOrder


def next_stage(at: Stage) -> Stage:
    """The only stage that may come next."""
    return NEXT[at]


def phase_of(at: Stage) -> Phase | None:
    """The phase that holds at `at`; None in the middle of a changeover."""
    return RULES[at].completes


def advance(at: Stage, stage: Stage) -> Stage:
    """Where the node is after `stage`. Raises StageOrder when another one must come first."""
    if RULES[stage].after is not at:
        raise StageOrder(
            f"{stage} cannot come after {at}; the next stage is {NEXT[at]}", stage=stage, after=at, allowed=NEXT[at]
        )
    return stage


def path(at: Stage, to: Phase) -> tuple[Stage, ...]:
    """The stages that lead forwards from `at` to phase `to`; none when it holds."""
    stages: list[Stage] = []
    while phase_of(at) is not to:
        at = next_stage(at)
        stages.append(at)
    return tuple(stages)


def leads_to(at: Stage) -> Phase:
    """The phase that comes next, going forwards."""
    phase = None
    while phase is None:
        at = next_stage(at)
        phase = phase_of(at)
    return phase


def since_phase(at: Stage) -> tuple[Stage, ...]:
    """The stages completed since a phase last held, in their order; none while one holds."""
    stages: list[Stage] = []
    while phase_of(at) is None:
        stages.insert(0, at)
        at = RULES[at].after
    return tuple(stages)


def undo_path(finished: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages of `finished` in the order in which they are taken back; none when one of them has no undo.

    Newest first, and rollout's before the trainer's: so rollout's memory leaves before the trainer takes its own again, and
    every state on the way back is one that the ring has (`ring_position`), even if the coordinator dies in the middle.
    """
    if not all(RULES[stage].has_undo for stage in finished):
        return ()
    newest_first = finished[::-1]
    of_rollout = (stage for stage in newest_first if RULES[stage].service is Service.ROLLOUT)
    of_trainer = (stage for stage in newest_first if RULES[stage].service is Service.TRAINER)
    return (*of_rollout, *of_trainer)


def turns_back(at: Stage, to: Phase) -> bool:
    """Whether undoing is the way from `at` to phase `to`: it held last, and every stage since then can be taken back."""
    stages = since_phase(at)
    return bool(undo_path(stages)) and phase_of(RULES[stages[0]].after) is to


def ring_position(*, trainer: Stage | None, rollout: Stage | None) -> Stage | None:
    """Where the node is, from the last stage that each service says it completed (None: freshly started).

    A rollout that was restarted is asleep, which fits wherever the trainer is. A trainer that was restarted is loaded, and the
    node is where rollout is: it goes on to LOAD_TRAINER, or back (`lost_weights`). None when the two do not fit together.
    """
    if trainer is None and rollout is not None and rollout is not Stage.PAUSE_WEIGHTS:
        return rollout
    if lost_weights(trainer=trainer, rollout=rollout):
        return rollout
    seen = {Service.TRAINER: trainer or Stage.LOAD_TRAINER, Service.ROLLOUT: rollout or Stage.PAUSE_WEIGHTS}
    return _RING_POSITIONS.get((seen[Service.TRAINER], seen[Service.ROLLOUT]))


def lost_weights(*, trainer: Stage | None, rollout: Stage | None) -> bool:
    """Whether rollout is to receive weights that are no longer published: the trainer was restarted, or took them back, and perhaps
    made room, while rollout did not answer. The only way is back."""
    if trainer is Stage.OFFLOAD:
        return rollout is Stage.RESUME_WEIGHTS
    return trainer in (None, Stage.LOAD_TRAINER) and rollout in (Stage.RESUME_WEIGHTS, Stage.SYNC)


_RING_POSITIONS = {(last_of(Service.TRAINER, at), last_of(Service.ROLLOUT, at)): at for at in RULES}
