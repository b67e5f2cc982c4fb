"""A whole journal as values, the invariants that it must keep, and whether any of its rows are missing.

It is read without writing to it: of a running node, of one that ended, or of a copy.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from tasuki.coordinator.journal_file import id_number, id_text, open_snapshot
from tasuki.wire.errors import StaleSequence
from tasuki.wire.stages import Phase, Service, Stage, StageStatus

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class ChangeoverRecord:
    """A row of `changeovers` with its outcome. status: None while it is open."""

    id: str
    epoch: int
    origin: Stage
    target: Phase
    status: StageStatus | None
    policy_version: int | None
    error_reason: str


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A row of `stages` with its result. boot_ids: of the services, as last observed before it.

    status: None without a result. is_settled: it was inferred from the services' later state, and is no answer.
    """

    id: int
    changeover_id: str
    stage: Stage
    is_undo: bool
    epoch: int
    sequence: int
    request_id: str
    boot_ids: dict[Service, str]
    status: StageStatus | None
    policy_version: int | None
    error_reason: str
    is_settled: bool


@dataclass(frozen=True, slots=True)
class History:
    """Contents of a journal, in the order written. A row with two outcomes is there twice."""

    epochs: tuple[int, ...]
    changeovers: tuple[ChangeoverRecord, ...]
    stages: tuple[StageRecord, ...]
    lost_results: tuple[int, ...]
    """Results without an intent."""
    lost_endings: tuple[str, ...]
    """Outcomes without a changeover, by its id."""
    highest: dict[str, int] = field(default_factory=dict)
    """Last number given in each table, by table name, from SQLite's own count."""


def read_history(path: Path) -> History:
    """Reads the journal at `path`. Raises PathNotFound, and InvalidArgument for a file that is no journal of this version."""
    with open_snapshot(path) as db:

        def rows(query: str, make: Callable[[sqlite3.Row], _Row]) -> tuple[_Row, ...]:
            return tuple(make(row) for row in db.execute(query))

        return History(
            epochs=rows("SELECT epoch FROM epochs ORDER BY epoch", lambda row: _number(row, "epoch")),
            changeovers=rows("SELECT * FROM changeovers LEFT JOIN outcomes USING (number) ORDER BY number", _changeover),
            stages=rows(
                "SELECT stages.*, status, seconds, policy_version, error_reason FROM stages LEFT JOIN results USING (id) ORDER BY id",
                _stage,
            ),
            lost_results=rows(
                "SELECT id FROM results WHERE id NOT IN (SELECT id FROM stages) ORDER BY id", lambda row: _number(row, "id")
            ),
            lost_endings=rows(
                "SELECT number FROM outcomes WHERE number NOT IN (SELECT number FROM changeovers) ORDER BY number",
                lambda row: id_text(_number(row, "number")),
            ),
            highest=dict(rows("SELECT * FROM sqlite_sequence", lambda row: (_text(row, "name"), _number(row, "seq")))),
        )


def _changeover(row: sqlite3.Row) -> ChangeoverRecord:
    number, epoch = _number(row, "number"), _number(row, "epoch")
    return ChangeoverRecord(id_text(number), epoch, Stage(row["origin"]), Phase(row["target"]), *_outcome(row))


def _stage(row: sqlite3.Row) -> StageRecord:
    status, version, reason = _outcome(row)
    return StageRecord(
        id=_number(row, "id"),
        changeover_id=id_text(_number(row, "number")),
        stage=Stage(row["stage"]),
        is_undo=bool(_number(row, "is_undo")),
        epoch=_number(row, "epoch"),
        sequence=_number(row, "sequence"),
        request_id=_text(row, "request_id"),
        boot_ids={Service.TRAINER: _text(row, "trainer_boot_id"), Service.ROLLOUT: _text(row, "rollout_boot_id")},
        status=status,
        policy_version=version,
        error_reason=reason,
        is_settled=row["seconds"] == 0.0,  # written so by `resolve_intents`; a real answer takes time
    )


def _outcome(row: sqlite3.Row) -> tuple[StageStatus | None, int | None, str]:
    """Status, policy version and reason of an error."""
    if row["status"] is None:
        return None, None, ""
    version = None if row["policy_version"] is None else _number(row, "policy_version")
    return StageStatus(row["status"]), version, _text(row, "error_reason")


def _number(row: sqlite3.Row, column: str) -> int:
    """Checks a numeric column, since SQLite stores values of any type. Raises ValueError."""
    value = row[column]
    if not isinstance(value, int):
        raise ValueError(f"{value!r} as {column}, where a number belongs")
    return value


def _text(row: sqlite3.Row, column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise ValueError(f"{value!r} as {column}, where a text belongs")
    return value


class Invariant(StrEnum):
    """Promise that every journal and log must keep. docs/reference/audit.md lists them in the same words."""

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
    def at_intent(cls, intent: StageRecord, invariant: Invariant, expected: str) -> Broken:
        return cls(Violation(invariant, expected, intent.changeover_id, intent.stage, intent.epoch, intent.sequence))


def check_gaps(history: History) -> None:
    """Raises Broken at the first missing number, or where a life of a service comes back after another."""
    _check_none_missing("epochs", history.epochs, history, name=lambda number: f"epoch {number}")
    changeovers = [id_number(changeover.id) for changeover in history.changeovers]
    _check_none_missing("changeovers", changeovers, history, name=id_text)
    _check_none_missing("stages", [intent.id for intent in history.stages], history, name=lambda number: f"intent {number}")
    _check_sequences(history)
    for service in Service:
        _check_lives(service, history.stages)


def _check_none_missing(table: str, numbers: Sequence[int], history: History, *, name: Callable[[int], str]) -> None:
    """Checks that rows are numbered from 1 without a gap; the number of a row that failed to write is reused."""
    for expected, number in enumerate(numbers, start=1):
        if number != expected:
            raise Broken.at_changeover(Invariant.NONE_MISSING, f"{name(expected)}, found {name(number)} in its place")
    highest = history.highest.get(table, 0)
    if highest > len(numbers):
        text = f"{name(len(numbers) + 1)}, since the journal has numbered {table} up to {highest}"
        raise Broken.at_changeover(Invariant.NONE_MISSING, text)


def _check_sequences(history: History) -> None:
    passed_over = {stage.id for stage in history.stages if stage.error_reason == StaleSequence.reason}
    epoch, sequence = 0, 0
    for intent in history.stages:
        sequence = sequence + 1 if intent.epoch == epoch else 1
        # Another caller used numbers in a service: the coordinator continues after those.
        if intent.sequence != sequence and not (sequence > 1 and intent.id - 1 in passed_over):
            raise Broken.at_intent(intent, Invariant.NONE_MISSING, f"sequence {sequence}, found {intent.sequence}")
        epoch, sequence = intent.epoch, intent.sequence


def _check_lives(service: Service, intents: Sequence[StageRecord]) -> None:
    now, over = "", set[str]()
    for intent in intents:
        boot_id = intent.boot_ids[service]
        if boot_id in over:
            text = f"{service} with boot id {now}, which came after {boot_id}"
            raise Broken.at_intent(intent, Invariant.LIVES_IN_ORDER, text)
        if boot_id and boot_id != now:
            over |= {now} - {""}
            now = boot_id
