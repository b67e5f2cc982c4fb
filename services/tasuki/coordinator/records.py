"""Stages and changeovers as values, for the journal and its readers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tasuki.coordinator.phases import next_stage, phase_of
from tasuki.memory.stages import Phase, Stage


class Status(StrEnum):
    """How far a stage or a changeover is."""

    STARTED = "STARTED"
    DONE = "DONE"
    FAILED = "FAILED"
    UNDONE = "UNDONE"
    HELD = "HELD"


@dataclass(frozen=True, slots=True)
class Intent:
    """Stage command as recorded before it is sent."""

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
    """Outcome of a stage. `answer`: data for a later stage; `policy_version`: the version published or received."""

    num_bytes: int = 0
    answer: bytes = b""
    policy_version: int | None = None


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


@dataclass(frozen=True, slots=True)
class ChangeoverRecord:
    """One changeover as recorded; `events` has the outcome of each intent, in order."""

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
        """Latest event of each stage: a stage that was undone is UNDONE."""
        latest: dict[Stage | None, StageEvent] = {}
        for event in self.events:
            latest[event.stage] = event
        return tuple(latest.values())

    def ending(self) -> StageEvent:
        """Event that closes the changeover: no stage, with the status and seconds of the whole."""
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
    """State of the node, as the coordinator reports it. `at` is None while its stage is unknown."""

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
    """SHA-256 of the checksums of rollout's weights; empty if unknown."""

    @property
    def phase(self) -> Phase | None:
        """Current phase; None in the middle of a changeover."""
        return phase_of(self.at) if self.at else None

    @property
    def next_stage(self) -> Stage | None:
        return next_stage(self.at) if self.at else None


def id_text(number: int) -> str:
    """Id of a changeover, such as "c000012"."""
    return f"c{number:06d}"


def id_number(changeover_id: str) -> int:
    """Number in a changeover's id."""
    return int(changeover_id.removeprefix("c"))
