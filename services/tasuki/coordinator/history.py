"""A whole journal as values, read without writing to it: of a running node, of one that ended, or of a copy."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tasuki.coordinator.journal import id_text
from tasuki.coordinator.phases import Phase, Service, Stage
from tasuki.coordinator.records import Status
from tasuki.coordinator.tables import SCHEMA_VERSION
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


def read_history(path: Path) -> History:
    """The journal at `path`. Raises PathNotFound, and InvalidArgument for a file that is no journal of this version."""
    if not path.is_file():
        raise PathNotFound(f"there is no journal at {path}", path=path)
    # Without a write-ahead log nobody writes, and the file is all there is; then nothing is put beside it.
    options = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?{options}", uri=True, isolation_level=None)) as db:
            db.row_factory = sqlite3.Row
            return _read(db, path)
    except sqlite3.Error as error:
        raise InvalidArgument("journal", f"{path} cannot be read: {error}", path=path) from error
    except ValueError as error:  # a stage, phase or status
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
        epochs=rows("SELECT epoch FROM epochs ORDER BY epoch", lambda row: row["epoch"]),
        changeovers=rows("SELECT * FROM changeovers ORDER BY number", _changeover),
        endings=rows("SELECT * FROM outcomes ORDER BY number", _ending),
        intents=rows("SELECT * FROM stages ORDER BY id", _intent),
        results=rows("SELECT * FROM results ORDER BY id", _result),
    )


def _changeover(row: sqlite3.Row) -> BegunChangeover:
    return BegunChangeover(id_text(row["number"]), row["epoch"], Stage(row["origin"]), Phase(row["target"]))


def _ending(row: sqlite3.Row) -> ChangeoverEnding:
    return ChangeoverEnding(id_text(row["number"]), Status(row["status"]), row["policy_version"], row["error_reason"])


def _intent(row: sqlite3.Row) -> StageIntent:
    return StageIntent(
        id=row["id"],
        changeover_id=id_text(row["number"]),
        stage=Stage(row["stage"]),
        is_undo=bool(row["is_undo"]),
        epoch=row["epoch"],
        sequence=row["sequence"],
        request_id=row["request_id"],
        boot_ids={Service.TRAINER: row["trainer_boot_id"], Service.ROLLOUT: row["rollout_boot_id"]},
    )


def _result(row: sqlite3.Row) -> StageResult:
    is_settled = row["seconds"] == 0.0  # `settle` writes it so; no answer comes in no time
    return StageResult(row["id"], Status(row["status"]), row["policy_version"], row["error_reason"], is_settled)
