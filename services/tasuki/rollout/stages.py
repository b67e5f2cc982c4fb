"""Which stage the rollout service accepts after which, by the ring and the moves that undo one. Pure.

The service's place on the ring is the last stage that it completed; None after a start, asleep.
"""

from __future__ import annotations

from tasuki.memory.stages import RULES, START, Rpc, Service, Stage, allowed_after
from tasuki.wire.errors import Busy, EnginePoisoned, StageOrder


def check_stage(stage: Stage, *, after: Stage | None, poison_reason: str | None) -> None:
    """Raises StageOrder, or EnginePoisoned, unless `stage` may follow `after`.

    A poisoned engine only gives its memory back, so that the trainer can go on.
    """
    accepted = allowed_after(Service.ROLLOUT, after)
    if poison_reason is not None:
        if RULES[stage].rpc is not Rpc.PAUSE:
            raise EnginePoisoned(f"the engine must be restarted: {poison_reason}", stage=stage)
    elif stage not in accepted:
        place, allowed = after or START, ", ".join(accepted)
        raise StageOrder(f"stage {stage} cannot follow {place}; allowed: {allowed}", stage=stage, after=place, allowed=allowed)


def check_idle(stage: Stage, *, num_running: int) -> None:
    """Raises Busy when memory that running requests use would be taken away."""
    if RULES[stage].rpc is Rpc.PAUSE and num_running:
        raise Busy(f"{num_running} requests run; drain before {stage}", stage=stage, num_running=num_running)


def is_serving(after: Stage | None) -> bool:
    return after is Stage.RESUME_KV
