"""What the journal holds and the coordinator tells: stages and changeovers as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tasuki.coordinator.phases import next_stage, phase_of
from tasuki.memory.stages import Phase, Stage
from tasuki.memory.tags import Movement


class Status(StrEnum):
    """How far a stage or a changeover is."""

    STARTED = "STARTED"
    DONE = "DONE"
    FAILED = "FAILED"
    UNDONE = "UNDONE"
    HELD = "HELD"


@dataclass(frozen=True, slots=True)
class Intent:
    """A stage command as it is written down before it is sent."""

    id: int
    changeover_id: str
    stage: Stage
    is_undo: bool
    epoch: int
    sequence: int
    request_id: str
    time: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a stage came to. `answer`: what a later stage needs of it; `policy_version`: what it published or received."""

    num_bytes: int = 0
    answer: bytes = b""
    policy_version: int | None = None
    begun: tuple[Movement, ...] = ()
    """What goes on behind the stage."""
    ended: tuple[Movement, ...] = ()
    """What went on behind earlier stages of the same service, and has ended."""


@dataclass(frozen=True, slots=True)
class StageEvent:
    """Something that happened to a stage, or, when `stage` is None, to the whole changeover. `time`: seconds since 1970."""

    changeover_id: str
    stage: Stage | None
    status: Status
    time: float
    seconds: float = 0.0
    num_bytes: int = 0
    error_reason: str = ""
    error_message: str = ""
    begun: tuple[Movement, ...] = ()
    ended: tuple[Movement, ...] = ()


@dataclass(frozen=True, slots=True)
class ChangeoverRecord:
    """One hand-over as the journal tells it; `events` has what became of each intent, in the order of the intents."""

    changeover_id: str
    epoch: int
    request_id: str
    origin: Stage
    target: Phase
    status: Status
    policy_version: int | None
    start_time: float
    seconds: float
    error_reason: str
    error_message: str
    events: tuple[StageEvent, ...]

    def stages(self) -> tuple[StageEvent, ...]:
        """One event for each stage, as it is now: a stage that was taken back is UNDONE."""
        latest: dict[Stage | None, StageEvent] = {}
        for event in self.events:
            latest[event.stage] = event
        return tuple(latest.values())

    def ending(self) -> StageEvent:
        """The event that closes the changeover: it has no stage, and the status and the seconds of the whole."""
        return StageEvent(
            self.changeover_id,
            None,
            self.status,
            time=self.start_time + self.seconds,
            seconds=self.seconds,
            error_reason=self.error_reason,
            error_message=self.error_message,
        )


@dataclass(frozen=True, slots=True)
class NodeState:
    """The node as the coordinator tells it. `at` is None while nobody knows where it is."""

    at: Stage | None
    epoch: int
    policy_version: int | None
    boot_id: str
    changeover_id: str
    trainer_target: str
    rollout_target: str
    num_changeovers: int
    last_error: str
    weights_digest: bytes = b""
    """SHA-256 of the sums of what rollout holds; empty when nobody knows them."""

    @property
    def phase(self) -> Phase | None:
        """None in the middle of a changeover."""
        return phase_of(self.at) if self.at else None

    @property
    def next_stage(self) -> Stage | None:
        return next_stage(self.at) if self.at else None


def id_text(number: int) -> str:
    """Id of a changeover, such as "c000012"."""
    return f"c{number:06d}"


def id_number(changeover_id: str) -> int:
    """The number in such an id."""
    return int(changeover_id.removeprefix("c"))
