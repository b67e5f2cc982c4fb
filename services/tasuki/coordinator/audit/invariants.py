"""What must be true of every run, and how a breach is told. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tasuki.coordinator.audit.history import StageIntent
from tasuki.memory.stages import Stage


class Invariant(StrEnum):
    """What must be true of every journal."""

    NUMBERS_GROW = "numbers-grow"
    """Epochs never go back, and the sequence numbers of an epoch grow."""
    ONE_OPEN = "one-open-changeover"
    """A changeover has ended before the next one begins."""
    ONE_RESULT = "one-result"
    """A result belongs to an intent and an ending to a changeover, at most one to each, and says what such a one can come to."""
    SETTLED = "intents-settled"
    """An intent has its result before the next intent: only the last one may wait for it."""
    ORIGIN = "origin"
    """A changeover begins where the journal left the node, or where it is with a service freshly started, as which a silent one
    counts, too."""
    RING = "ring"
    """A stage comes after the one that the ring has before it."""
    UNDO = "undo"
    """Stages are taken back in the order of the way back, and only those that were begun."""
    ONE_HOLDER = "one-holder"
    """Rollout takes its KV cache only while the trainer is offloaded, the trainer its memory only while rollout is asleep."""
    SYNC = "sync-of-published"
    """What SYNC received is what the same life of the trainer published last, and has not taken back."""
    SERVED = "served-after-sync"
    """A version is served only after its SYNC into the same life of rollout."""
    VERSIONS_GROW = "versions-grow"
    """A life of rollout never serves an older version than before, and the trainer publishes an older one only after it was restarted in
    another epoch: a checkpoint that is older than the present version is refused."""
    MOVEMENTS = "movements-end"
    """What goes on behind a stage has ended when the opposite stage is answered by the same life of the service, and moved no more than
    was named."""
    TARGET = "target"
    """A changeover that is done has reached its phase, and tells the version that is served there."""
    EXECUTED_ONCE = "executed-once"
    """No life of a service carries a command out twice, and the journal has the answer that the service gave."""
    EXECUTED_IN_ORDER = "executed-in-order"
    """A service carries stage commands out in the order of their epochs and sequence numbers."""
    AS_ASKED = "executed-as-asked"
    """What a service carried out is what the journal says it was asked, by the same life and with the same version, and nothing that
    the journal says was done is missing in the service's log."""
    NONE_MISSING = "none-missing"
    """Epochs, changeovers and intents are numbered without a gap, up to the last number that was given."""
    LIVES_IN_ORDER = "lives-in-order"
    """A life of a service does not come back once another one has followed it."""
    TRAINED_ONCE = "trained-once"
    """No command is twice in the trainer's log, and a step in it has gradients before it."""


@dataclass(frozen=True, slots=True)
class Violation:
    """The first thing that is wrong. `stage`, `epoch` and `sequence` are None where it is about no single command."""

    invariant: StrEnum
    expected: str
    changeover_id: str = ""
    stage: Stage | None = None
    epoch: int | None = None
    sequence: int | None = None


class Broken(Exception):
    """Ends a replay."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.expected)
        self.violation = violation

    @classmethod
    def at_changeover(cls, invariant: Invariant, expected: str, changeover_id: str = "", *, epoch: int | None = None) -> Broken:
        return cls(Violation(invariant, expected, changeover_id, epoch=epoch))

    @classmethod
    def at_intent(cls, intent: StageIntent, invariant: Invariant, expected: str) -> Broken:
        return cls(Violation(invariant, expected, intent.changeover_id, intent.stage, intent.epoch, intent.sequence))
