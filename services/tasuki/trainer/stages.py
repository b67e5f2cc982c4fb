"""Which stage of a changeover the trainer accepts after which: its part of the ring, and the way back from a failed changeover.

The trainer's place on the ring is the last stage that it completed. After a start it is loaded, as after LOAD_TRAINER.
"""

from __future__ import annotations

from tasuki.v1.types_pb2 import STAGE_LOAD_TRAINER, STAGE_LOAD_WEIGHTS, STAGE_OFFLOAD, STAGE_UNSPECIFIED, Stage
from tasuki.wire.errors import StageOrder, WrongPhase

# LOAD_TRAINER leads back to training and, in a changeover that failed after it, undoes OFFLOAD.
_NEXT: dict[Stage.ValueType, Stage.ValueType] = {
    STAGE_UNSPECIFIED: STAGE_LOAD_WEIGHTS,
    STAGE_LOAD_TRAINER: STAGE_LOAD_WEIGHTS,
    STAGE_LOAD_WEIGHTS: STAGE_OFFLOAD,
    STAGE_OFFLOAD: STAGE_LOAD_TRAINER,
}
_LOADED = (STAGE_UNSPECIFIED, STAGE_LOAD_TRAINER)


def raise_unless_next(stage: Stage.ValueType, *, after: Stage.ValueType) -> None:
    """Raises StageOrder unless `stage` is the one that follows `after`.

    LOAD_TRAINER may also come first: a trainer that was started anew in the middle of a changeover is loaded already. OFFLOAD may
    come without a publication: it takes LOAD_TRAINER back, and makes room for an engine that starts.
    """
    allowed = _NEXT[after]
    is_undo = stage == STAGE_OFFLOAD and after in _LOADED
    if stage != allowed and not is_undo and (stage, after) != (STAGE_LOAD_TRAINER, STAGE_UNSPECIFIED):
        raise _stage_order(Stage.Name(stage) if stage in Stage.values() else str(stage), after=after, allowed=allowed)


def stage_after_withdrawal(after: Stage.ValueType) -> Stage.ValueType:
    """Undoes LOAD_WEIGHTS: back to where training may go on. Harmless when nothing is published; raises StageOrder while offloaded."""
    if after == STAGE_OFFLOAD:
        raise _stage_order("WithdrawWeights", after=after, allowed=_NEXT[after])
    return STAGE_LOAD_TRAINER if after == STAGE_LOAD_WEIGHTS else after


def raise_unless_loaded(after: Stage.ValueType) -> None:
    """Raises WrongPhase unless the trainer may learn, score and save."""
    if after not in _LOADED:
        raise WrongPhase(f"the trainer is past {Stage.Name(after)}: acquire phase TRAIN first", needed="PHASE_TRAIN")


def _stage_order(asked: str, *, after: Stage.ValueType, allowed: Stage.ValueType) -> StageOrder:
    return StageOrder(
        f"{asked} is out of order: the trainer's last stage is {Stage.Name(after)}, next is {Stage.Name(allowed)}",
        stage=asked,
        after=Stage.Name(after),
        allowed=Stage.Name(allowed),
    )
