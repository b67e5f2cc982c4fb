"""A whole journal as values, read without writing to it: of a running node, of one that ended, or of a copy."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tasuki.coordinator.journal_reader import open_journal
from tasuki.coordinator.journal_schema import SCHEMA_VERSION
from tasuki.coordinator.movement_rows import MovementRows, read_movements
from tasuki.coordinator.records import Status, id_text
from tasuki.memory.stages import Phase, Service, Stage
from tasuki.wire.errors import InvalidArgument, PathNotFound

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class BegunChangeover:
    """A row of `changeovers`."""

    id: str
    epoch: int
    origin: Stage
    target: Phase


@dataclass(frozen=True, slots=True)
class ChangeoverEnding:
    """A row of `outcomes`."""

    changeover_id: str
    status: Status
    policy_version: int | None
    error_reason: str


@dataclass(frozen=True, slots=True)
class StageIntent:
    """A row of `stages`. boot_ids: the services' as they were seen last before it."""

    id: int
    changeover_id: str
    stage: Stage
    is_undo: bool
    epoch: int
    sequence: int
    request_id: str
    boot_ids: dict[Service, str]


@dataclass(frozen=True, slots=True)
class StageResult:
    """A row of `results`. id: the intent's. is_settled: no answer, but what the services showed later."""

    id: int
    status: Status
    policy_version: int | None
    error_reason: str
    is_settled: bool


@dataclass(frozen=True, slots=True)
class History:
    """Everything in a journal, in the order in which it was written."""

    epochs: tuple[int, ...]
    changeovers: tuple[BegunChangeover, ...]
    endings: tuple[ChangeoverEnding, ...]
    intents: tuple[StageIntent, ...]
    results: tuple[StageResult, ...]
    movements: MovementRows = field(default_factory=lambda: MovementRows({}))
    highest: dict[str, int] = field(default_factory=dict)
    """The last number that was ever given in a table, by the table's name, as SQLite remembers it."""


def read_history(path: Path) -> History:
    """The journal at `path`. Raises PathNotFound, and InvalidArgument for a file that is no journal of this version."""
    if not path.is_file():
        raise PathNotFound(f"there is no journal at {path}", path=path)
    try:
        with open_journal(path) as db:
            return _read(db, path)
    except (sqlite3.Error, OSError) as error:
        raise InvalidArgument("journal", f"{path} cannot be read: {error}", path=path) from error
    except ValueError as error:  # a stage, phase or status, or what is no number
        raise InvalidArgument("journal", f"{path} holds what this build does not know: {error}", path=path) from error


def _read(db: sqlite3.Connection, path: Path) -> History:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version != SCHEMA_VERSION:
        raise InvalidArgument(
            "journal", f"{path} has schema version {version}, this build reads {SCHEMA_VERSION}", version=version
        )
    damage = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage != "ok":
        raise InvalidArgument("journal", f"{path} is damaged: {damage}", path=path)
    db.execute("BEGIN")  # one moment for all tables

    def rows(query: str, make: Callable[[sqlite3.Row], _Row]) -> tuple[_Row, ...]:
        return tuple(make(row) for row in db.execute(query))

    return History(
        epochs=rows("SELECT epoch FROM epochs ORDER BY epoch", lambda row: _number(row, "epoch")),
        changeovers=rows("SELECT * FROM changeovers ORDER BY number", _changeover),
        endings=rows("SELECT * FROM outcomes ORDER BY number", _ending),
        intents=rows("SELECT * FROM stages ORDER BY id", _intent),
        results=rows("SELECT * FROM results ORDER BY id", _result),
        movements=_movements(db),
        highest=dict(rows("SELECT * FROM sqlite_sequence", lambda row: (_text(row, "name"), _number(row, "seq")))),
    )


def _movements(db: sqlite3.Connection) -> MovementRows:
    """None of a journal that an earlier build wrote, which had no such table."""
    has_table = db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'movements'").fetchone()
    return read_movements(db) if has_table else MovementRows({})


def _changeover(row: sqlite3.Row) -> BegunChangeover:
    number, epoch = _number(row, "number"), _number(row, "epoch")
    return BegunChangeover(id_text(number), epoch, Stage(row["origin"]), Phase(row["target"]))


def _ending(row: sqlite3.Row) -> ChangeoverEnding:
    number, version = _number(row, "number"), _version(row)
    return ChangeoverEnding(id_text(number), Status(row["status"]), version, _text(row, "error_reason"))


def _intent(row: sqlite3.Row) -> StageIntent:
    return StageIntent(
        id=_number(row, "id"),
        changeover_id=id_text(_number(row, "number")),
        stage=Stage(row["stage"]),
        is_undo=bool(_number(row, "is_undo")),
        epoch=_number(row, "epoch"),
        sequence=_number(row, "sequence"),
        request_id=_text(row, "request_id"),
        boot_ids={Service.TRAINER: _text(row, "trainer_boot_id"), Service.ROLLOUT: _text(row, "rollout_boot_id")},
    )


def _result(row: sqlite3.Row) -> StageResult:
    is_settled = row["seconds"] == 0.0  # `resolve_intents` writes it so; no answer comes in no time
    return StageResult(_number(row, "id"), Status(row["status"]), _version(row), _text(row, "error_reason"), is_settled)


def _number(row: sqlite3.Row, column: str) -> int:
    """SQLite keeps whatever it is given, also where a number belongs. Raises ValueError."""
    value = row[column]
    if not isinstance(value, int):
        raise ValueError(f"{value!r} as {column}, where a number belongs")
    return value


def _text(row: sqlite3.Row, column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise ValueError(f"{value!r} as {column}, where a text belongs")
    return value


def _version(row: sqlite3.Row) -> int | None:
    return None if row["policy_version"] is None else _number(row, "policy_version")
