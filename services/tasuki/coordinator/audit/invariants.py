"""Invariants of every run, and the report of a breach. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tasuki.coordinator.audit.history import StageIntent
from tasuki.wire.stages import Stage


class Invariant(StrEnum):
    """Promise that every journal and log must keep. docs/audit.md lists them in the same words."""

    NUMBERS_GROW = "numbers-grow"
    """Epochs never go back, and the sequence numbers of an epoch grow."""
    ONE_OPEN = "one-open-changeover"
    """A changeover has ended before the next one begins."""
    ONE_RESULT = "one-result"
    """A result belongs to an intent and an ending to a changeover, at most one to each, with an outcome allowed there."""
    SETTLED = "intents-settled"
    """An intent has its result before the next one is written; only the last may wait for it."""
    ORIGIN = "origin"
    """A changeover begins where the journal left the node, or where a restarted service put it; a silent service counts as restarted."""
    RING = "ring"
    """A stage follows the one before it in the ring."""
    UNDO = "undo"
    """Stages are undone newest first, rollout's before the trainer's, and only those that began."""
    ONE_HOLDER = "one-holder"
    """Rollout takes its KV cache only while the trainer is offloaded; the trainer takes its memory only while rollout is asleep."""
    SYNC = "sync-of-published"
    """SYNC received what the same life of the trainer published last and has not withdrawn."""
    SERVED = "served-after-sync"
    """A version is served only after its SYNC into the same life of rollout."""
    VERSIONS_GROW = "versions-grow"
    """A life of rollout never serves an older version than before; a trainer publishes an older one only after a restart in another epoch.

    A checkpoint older than the present version is refused.
    """
    TARGET = "target"
    """A completed changeover reached its phase, and names the version served there."""
    EXECUTED_ONCE = "executed-once"
    """No life of a service executed a command twice, and the journal has the service's answer."""
    EXECUTED_IN_ORDER = "executed-in-order"
    """A service executed stage commands in the order of their epochs and sequence numbers."""
    AS_ASKED = "executed-as-asked"
    """An executed stage has a matching intent, in the same life and version; a completed one has its line in the log."""
    NONE_MISSING = "none-missing"
    """Epochs, changeovers and intents are numbered without a gap, up to the last number given."""
    LIVES_IN_ORDER = "lives-in-order"
    """A life of a service does not come back once another followed it."""
    TRAINED_ONCE = "trained-once"
    """No command is twice in the trainer's log, and every step in it has gradients before it."""


@dataclass(frozen=True, slots=True)
class Violation:
    """First breach found. `stage`, `epoch` and `sequence` are None if it concerns no single command."""

    invariant: StrEnum
    expected: str
    changeover_id: str = ""
    stage: Stage | None = None
    epoch: int | None = None
    sequence: int | None = None


class Broken(Exception):
    """Raised at the first violation, to end a replay."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.expected)
        self.violation = violation

    @classmethod
    def at_changeover(cls, invariant: Invariant, expected: str, changeover_id: str = "", *, epoch: int | None = None) -> Broken:
        return cls(Violation(invariant, expected, changeover_id, epoch=epoch))

    @classmethod
    def at_intent(cls, intent: StageIntent, invariant: Invariant, expected: str) -> Broken:
        return cls(Violation(invariant, expected, intent.changeover_id, intent.stage, intent.epoch, intent.sequence))
