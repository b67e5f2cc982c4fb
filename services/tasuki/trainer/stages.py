"""The stages that the trainer accepts next: those of the ring, and those that undo a failed changeover.

The trainer's place in the ring is the last stage it completed; None after a start, when it is loaded, as after LOAD_TRAINER.
"""

from __future__ import annotations

from tasuki.wire.errors import StageOrder, WrongPhase
from tasuki.wire.stages import START, Service, Stage, allowed_after

_LOADED = (None, Stage.LOAD_TRAINER)


def raise_unless_next(stage: Stage, *, after: Stage | None) -> None:
    """Raises StageOrder unless `stage` may follow `after`.

    LOAD_TRAINER may come first: a trainer restarted during a changeover is already loaded. OFFLOAD may come without a publication: it
    undoes LOAD_TRAINER and makes room for an engine that starts.
    """
    if stage not in allowed_after(Service.TRAINER, after):
        raise _stage_order(stage, after=after)


def stage_after_withdrawal(after: Stage | None) -> Stage | None:
    """Undoes LOAD_WEIGHTS, so that training may continue. Does nothing without a publication; raises StageOrder while offloaded."""
    if after is Stage.OFFLOAD:
        raise _stage_order("WithdrawWeights", after=after)
    return Stage.LOAD_TRAINER if after is Stage.LOAD_WEIGHTS else after


def raise_unless_loaded(after: Stage | None) -> None:
    """Raises WrongPhase unless the trainer may train, score and save."""
    if after not in _LOADED:
        raise WrongPhase(f"the trainer is past {after}: acquire phase TRAIN first", needed="PHASE_TRAIN")


def _stage_order(asked: str, *, after: Stage | None) -> StageOrder:
    place, allowed = after or START, allowed_after(Service.TRAINER, after)[0]
    return StageOrder(
        f"{asked} is out of order: the trainer's last stage is {place}, next is {allowed}",
        stage=asked,
        after=place,
        allowed=allowed,
    )
