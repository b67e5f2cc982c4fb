"""The stages that the rollout service accepts next: those of the ring, and those that undo one. Pure.

The service's place in the ring is the last stage it completed; None after a start, asleep.
"""

from __future__ import annotations

from tasuki.memory.stages import RULES, START, Rpc, Service, Stage, allowed_after
from tasuki.wire.errors import Busy, EnginePoisoned, StageOrder


def check_stage(stage: Stage, *, after: Stage | None, poison_reason: str | None) -> None:
    """Raises StageOrder, or EnginePoisoned, unless `stage` may follow `after`.

    A poisoned engine may only release its memory, so that the trainer can continue.
    """
    accepted = allowed_after(Service.ROLLOUT, after)
    if poison_reason is not None:
        if RULES[stage].rpc is not Rpc.PAUSE:
            raise EnginePoisoned(f"the engine must be restarted: {poison_reason}", stage=stage)
    elif stage not in accepted:
        place, allowed = after or START, ", ".join(accepted)
        raise StageOrder(f"stage {stage} cannot follow {place}; allowed: {allowed}", stage=stage, after=place, allowed=allowed)


def check_idle(stage: Stage, *, num_running: int) -> None:
    """Raises Busy if running requests would lose their memory."""
    if RULES[stage].rpc is Rpc.PAUSE and num_running:
        raise Busy(f"{num_running} requests run; drain before {stage}", stage=stage, num_running=num_running)


def is_serving(after: Stage | None) -> bool:
    return after is Stage.RESUME_KV
