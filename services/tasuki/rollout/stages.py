"""The rollout service's ring of stages, with the moves that undo one. A pure table."""

from __future__ import annotations

from enum import StrEnum

from tasuki.memory.tags import MemoryTag
from tasuki.wire.errors import Busy, EnginePoisoned, InvalidArgument, StageOrder


class Stage(StrEnum):
    """A stage that this service takes part in; START is before the first one, asleep."""

    START = "start"
    RESUME_WEIGHTS = "resume_weights"
    SYNC = "sync"
    RESUME_KV = "resume_kv"
    DRAIN = "drain"
    PAUSE_KV = "pause_kv"
    PAUSE_WEIGHTS = "pause_weights"


# After each stage: the next one of the ring first, then the moves that undo.
_NEXT: dict[Stage, tuple[Stage, ...]] = {
    Stage.START: (Stage.RESUME_WEIGHTS,),
    Stage.RESUME_WEIGHTS: (Stage.SYNC, Stage.PAUSE_WEIGHTS),
    Stage.SYNC: (Stage.RESUME_KV, Stage.PAUSE_WEIGHTS),
    Stage.RESUME_KV: (Stage.DRAIN, Stage.PAUSE_KV),
    Stage.DRAIN: (Stage.PAUSE_KV, Stage.RESUME_KV),
    Stage.PAUSE_KV: (Stage.PAUSE_WEIGHTS, Stage.RESUME_KV),
    Stage.PAUSE_WEIGHTS: (Stage.RESUME_WEIGHTS,),
}
# A poisoned engine only gives its memory back, so that the trainer can go on.
_POISONED = (Stage.PAUSE_KV, Stage.PAUSE_WEIGHTS)
_TAG = {
    Stage.RESUME_WEIGHTS: MemoryTag.WEIGHTS,
    Stage.RESUME_KV: MemoryTag.KV_CACHE,
    Stage.PAUSE_KV: MemoryTag.KV_CACHE,
    Stage.PAUSE_WEIGHTS: MemoryTag.WEIGHTS,
}


def check_stage(stage: Stage, *, after: Stage, poison_reason: str | None) -> None:
    """Raises StageOrder, or EnginePoisoned, unless `stage` may follow `after`."""
    if poison_reason is not None:
        if stage not in _POISONED:
            raise EnginePoisoned(f"the engine must be started anew: {poison_reason}", stage=stage)
    elif stage not in _NEXT[after]:
        allowed = ", ".join(_NEXT[after])
        raise StageOrder(f"stage {stage} cannot follow {after}; allowed: {allowed}", stage=stage, after=after, allowed=allowed)


def check_idle(stage: Stage, *, num_running: int) -> None:
    """Raises Busy when memory that running requests use would be taken away."""
    if stage in (Stage.PAUSE_KV, Stage.PAUSE_WEIGHTS) and num_running:
        raise Busy(f"{num_running} requests run; drain before {stage}", stage=stage, num_running=num_running)


def check_tags(stage: Stage, tags: list[MemoryTag]) -> None:
    """Raises InvalidArgument for tags that the stage does not move. None at all is allowed: the stage then only counts."""
    for index, tag in enumerate(tags):
        if tag is not _TAG.get(stage):
            raise InvalidArgument(f"tags[{index}]", f"stage {stage} moves {_TAG.get(stage, 'no memory')}, not {tag}")


def is_serving(after: Stage) -> bool:
    return after is Stage.RESUME_KV
