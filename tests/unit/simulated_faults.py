"""Faults of a simulated node."""

from collections.abc import Callable
from enum import StrEnum


class Fault(StrEnum):
    """Fault of one call."""

    DROP = "the request is lost"
    LOSE = "the answer is lost"
    LATE = "the caller hears that the connection broke, and the request arrives a moment later"
    DUPLICATE = "the request arrives twice"
    SLOW = "the service takes half its deadline"
    HANG = "the service does not come to an end"
    REFUSE = "the service has no room"
    CORRUPT = "what SYNC receives is damaged"
    KILL = "the service dies before it begins"
    KILL_AFTER = "the service dies before it answers"
    KILL_OTHER = "the other service dies"
    CRASH = "the coordinator dies while the service works"
    CRASH_LATE = "the coordinator dies, and its request arrives when the next one has looked"


class CrashPoint(StrEnum):
    """Journal write at which the coordinator dies."""

    INTEND = "intend"
    INTENDED = "intended"
    NOTE = "note"
    NOTED = "noted"


class Crash(BaseException):
    """Ends the coordinator as SIGKILL does: none of its handlers runs."""


class JournalFailpoints:
    """Replaces the journal's failpoints. armed: a point, and how often to pass it first; full: a full disk instead of a crash."""

    def __init__(self, on_crash: Callable[[], None]) -> None:
        self.armed: tuple[CrashPoint, int] | None = None
        self.is_full = False
        self._on_crash = on_crash

    def hit(self, point: str) -> None:
        if self.armed is None or point.rpartition(".")[2] != self.armed[0]:
            return
        if self.armed[1] > 0:
            self.armed = (self.armed[0], self.armed[1] - 1)
            return
        self.armed = None
        if self.is_full:
            raise OSError(28, "No space left on device")
        self._on_crash()
        raise Crash
