"""A whole journal as values, read without writing to it: of a running node, of one that ended, or of a copy."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tasuki.coordinator.journal_file import check_version, id_text, open_journal
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tasuki.wire.regular_file import open_regular
from tasuki.wire.stages import Phase, Service, Stage, StageStatus

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
    status: StageStatus
    policy_version: int | None
    error_reason: str


@dataclass(frozen=True, slots=True)
class StageIntent:
    """A row of `stages`. boot_ids: of the services, as last observed before it."""

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
    """A row of `results`. id: of the intent. is_settled: inferred from the services' later state, not an answer."""

    id: int
    status: StageStatus
    policy_version: int | None
    error_reason: str
    is_settled: bool


@dataclass(frozen=True, slots=True)
class History:
    """Contents of a journal, in the order written."""

    epochs: tuple[int, ...]
    changeovers: tuple[BegunChangeover, ...]
    endings: tuple[ChangeoverEnding, ...]
    intents: tuple[StageIntent, ...]
    results: tuple[StageResult, ...]
    highest: dict[str, int] = field(default_factory=dict)
    """Last number given in each table, by table name, from SQLite's own count."""


def read_history(path: Path) -> History:
    """Reads the journal at `path`. Raises PathNotFound, and InvalidArgument for a file that is no journal of this version."""
    with named_if_denied(path, key="journal"):
        if not path.is_file():
            raise PathNotFound(f"there is no journal at {path}", path=path)
        open_regular(path).close()  # SQLite's error for a denied file is that of a missing one
    try:
        with open_journal(path) as db:
            return _read(db, path)
    except (sqlite3.Error, OSError) as error:
        raise InvalidArgument("journal", f"{path} cannot be read: {error}", path=path) from error
    except ValueError as error:  # an unknown stage, phase or status, or a value that is no number
        raise InvalidArgument("journal", f"{path} holds what this build does not know: {error}", path=path) from error


def _read(db: sqlite3.Connection, path: Path) -> History:
    check_version(db, path, key="journal")
    damage = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage != "ok":
        raise InvalidArgument("journal", f"{path} is damaged: {damage}", path=path)
    db.execute("BEGIN")  # one snapshot of all tables

    def rows(query: str, make: Callable[[sqlite3.Row], _Row]) -> tuple[_Row, ...]:
        return tuple(make(row) for row in db.execute(query))

    return History(
        epochs=rows("SELECT epoch FROM epochs ORDER BY epoch", lambda row: _number(row, "epoch")),
        changeovers=rows("SELECT * FROM changeovers ORDER BY number", _changeover),
        endings=rows("SELECT * FROM outcomes ORDER BY number", _ending),
        intents=rows("SELECT * FROM stages ORDER BY id", _intent),
        results=rows("SELECT * FROM results ORDER BY id", _result),
        highest=dict(rows("SELECT * FROM sqlite_sequence", lambda row: (_text(row, "name"), _number(row, "seq")))),
    )


def _changeover(row: sqlite3.Row) -> BegunChangeover:
    number, epoch = _number(row, "number"), _number(row, "epoch")
    return BegunChangeover(id_text(number), epoch, Stage(row["origin"]), Phase(row["target"]))


def _ending(row: sqlite3.Row) -> ChangeoverEnding:
    number, version = _number(row, "number"), _version(row)
    return ChangeoverEnding(id_text(number), StageStatus(row["status"]), version, _text(row, "error_reason"))


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
    is_settled = row["seconds"] == 0.0  # written so by `resolve_intents`; a real answer takes time
    return StageResult(_number(row, "id"), StageStatus(row["status"]), _version(row), _text(row, "error_reason"), is_settled)


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


def _version(row: sqlite3.Row) -> int | None:
    return None if row["policy_version"] is None else _number(row, "policy_version")
