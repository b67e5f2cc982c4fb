"""Ring of stages: a node's position, the next stage, and the way back. Pure: no I/O, no proto.

A node is *at* the stage it completed last: at LOAD_TRAINER it is in phase TRAIN, at RESUME_KV in phase ROLLOUT,
elsewhere in the middle of a changeover. The rows of the ring are in wire/stages.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.wire.errors import StageOrder
from tasuki.wire.stages import NEXT, RULES, Phase, Service, Stage, last_of


def next_stage(at: Stage) -> Stage:
    """Only stage that may come next."""
    return NEXT[at]


def phase_of(at: Stage) -> Phase | None:
    """Phase that holds at `at`; None in the middle of a changeover."""
    return RULES[at].completes


def advance(at: Stage, stage: Stage) -> Stage:
    """Position of the node after `stage`. Raises StageOrder if another stage must come first."""
    if RULES[stage].after is not at:
        raise StageOrder(
            f"{stage} cannot come after {at}; the next stage is {NEXT[at]}", stage=stage, after=at, allowed=NEXT[at]
        )
    return stage


def path(at: Stage, to: Phase) -> tuple[Stage, ...]:
    """Stages that lead forwards from `at` to phase `to`; none if it already holds."""
    stages: list[Stage] = []
    while phase_of(at) is not to:
        at = next_stage(at)
        stages.append(at)
    return tuple(stages)


def leads_to(at: Stage) -> Phase:
    """Next phase, going forwards."""
    phase = None
    while phase is None:
        at = next_stage(at)
        phase = phase_of(at)
    return phase


def since_phase(at: Stage) -> tuple[Stage, ...]:
    """Stages completed since a phase last held, in order; none while one holds."""
    stages: list[Stage] = []
    while phase_of(at) is None:
        stages.insert(0, at)
        at = RULES[at].after
    return tuple(stages)


def undo_path(finished: Sequence[Stage]) -> tuple[Stage, ...]:
    """Stages of `finished` in the order they are undone; none if one of them has no undo.

    Newest first, rollout's before the trainer's: rollout releases its memory before the trainer takes its own. Every state on the way
    back has a place in the ring (`ring_position`), even if the coordinator dies in the middle.
    """
    if not all(RULES[stage].has_undo for stage in finished):
        return ()
    newest_first = finished[::-1]
    of_rollout = (stage for stage in newest_first if RULES[stage].service is Service.ROLLOUT)
    of_trainer = (stage for stage in newest_first if RULES[stage].service is Service.TRAINER)
    return (*of_rollout, *of_trainer)


def turns_back(at: Stage, to: Phase) -> bool:
    """Whether undoing leads from `at` to phase `to`: it held last, and every stage since has an undo."""
    stages = since_phase(at)
    return bool(undo_path(stages)) and phase_of(RULES[stages[0]].after) is to


def ring_position(*, trainer: Stage | None, rollout: Stage | None) -> Stage | None:
    """Position of the node, from the last stage that each service reports as completed (None: freshly started).

    A restarted rollout is asleep, which is compatible with any position of the trainer. A restarted trainer is loaded, so the node is
    where rollout is: it goes on to LOAD_TRAINER, or back (`lost_weights`). None if the two contradict each other.
    """
    if trainer is None and rollout is not None and rollout is not Stage.PAUSE_WEIGHTS:
        return rollout
    if lost_weights(trainer=trainer, rollout=rollout):
        return rollout
    seen = {Service.TRAINER: trainer or Stage.LOAD_TRAINER, Service.ROLLOUT: rollout or Stage.PAUSE_WEIGHTS}
    return _RING_POSITIONS.get((seen[Service.TRAINER], seen[Service.ROLLOUT]))


def lost_weights(*, trainer: Stage | None, rollout: Stage | None) -> bool:
    """Whether rollout waits for weights that are no longer published, so the node can only go back.

    The trainer was restarted, or withdrew them and perhaps released its memory, while rollout did not answer.
    """
    if trainer is Stage.OFFLOAD:
        return rollout is Stage.RESUME_WEIGHTS
    return trainer in (None, Stage.LOAD_TRAINER) and rollout in (Stage.RESUME_WEIGHTS, Stage.SYNC)


_RING_POSITIONS = {(last_of(Service.TRAINER, at), last_of(Service.ROLLOUT, at)): at for at in RULES}
