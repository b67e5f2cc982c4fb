"""A node's journal: followed in columns, one row per finished stage, and read in pages of changeovers. Opened briefly, read-only."""

from __future__ import annotations

import json
import sqlite3
import threading
from array import array
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tasuki.coordinator.journal_file import id_text, open_journal
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.regular_file import unreadable
from tasuki.wire.stages import RING, Stage, StageStatus

_ROWS = 20_000
_BUSY_S = 0.2
_MAX_STAGES = 4_000_000
"""Half of which are forgotten at a time, the oldest first."""
_MAX_CHARS = 4_000
_MAX_NUMBER = 2**53
# Times of the year 5138 and earlier.
_MAX_SECONDS = 1e11
_MAX_PAGE = 200
QUERY_S = 10.0
"""Time limit for the queries of one look at a journal."""
STAGES = [rule.stage for rule in RING]
_STAGE_NUMBERS = {str(stage): number for number, stage in enumerate(STAGES)}


@dataclass(slots=True)
class StageColumns:
    """One row per finished stage, in order. Times are Unix times in seconds."""

    times: array[float] = field(default_factory=lambda: array("d"))
    numbers: array[int] = field(default_factory=lambda: array("q"))
    """Number of the changeover."""
    stages: array[int] = field(default_factory=lambda: array("b"))
    """Index in STAGES."""
    seconds: array[float] = field(default_factory=lambda: array("d"))
    is_done: array[int] = field(default_factory=lambda: array("b"))
    is_undo: array[int] = field(default_factory=lambda: array("b"))

    def forget(self, count: int) -> None:
        """Deletes the oldest rows."""
        for column in fields(self):
            del getattr(self, column.name)[:count]

    def copied(self) -> StageColumns:
        return StageColumns(*(getattr(self, column.name)[:] for column in fields(self)))


@dataclass
class JournalTail:
    """Reads on at each `advance`. For an unreadable journal it sets `problem` instead of raising."""

    path: Path
    problem: str = ""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._file: tuple[int, int] | None = None
        self._begin_again()

    def advance(self) -> bool:
        """Returns whether there was anything new."""
        try:
            status = self.path.stat()
        except OSError as error:
            return self._note_problem(unreadable(self.path, error) or f"there is no journal at {self.path}")
        file = (status.st_dev, status.st_ino)
        if file != self._file:
            self._file = file
            self._begin_again()
        try:
            with open_journal(self.path, busy_s=_BUSY_S, within_s=QUERY_S) as db:
                db.text_factory = lambda text: text[:_MAX_CHARS].decode(errors="replace")
                return self._read(db)
        except OSError as error:
            return self._note_problem(unreadable(self.path, error))
        except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
            is_busy = isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
            return False if is_busy else self._note_problem(f"{self.path} cannot be read: {error}")

    def copied(self) -> StageColumns:
        """A copy of the current columns."""
        with self._lock:
            return self.columns.copied()

    def last_seconds(self) -> dict[str, float]:
        """Seconds of each stage when it last succeeded."""
        with self._lock:
            columns = (reversed(column) for column in (self.columns.stages, self.columns.seconds, self.columns.is_done))
            found: dict[str, float] = {}
            for stage, seconds, is_done in zip(*columns, strict=True):
                if is_done:
                    found.setdefault(STAGES[stage], seconds)
                if len(found) == len(STAGES):
                    break
        return found

    def _begin_again(self) -> None:
        with self._lock:
            self.columns = StageColumns()
        self._last_id, self._last_epoch, self._last_ended, self._bad_rows = 0, 0, -1, ""

    def _note_problem(self, text: str) -> bool:
        is_new, self.problem = text != self.problem, text
        return is_new

    def _read(self, db: sqlite3.Connection) -> bool:
        first_id = self._last_id
        rows = db.execute(
            "SELECT id, number, stage, is_undo, status, results.time AS time, seconds"
            " FROM results JOIN stages USING (id) WHERE id > ? ORDER BY id LIMIT ?",
            (self._last_id, _ROWS),
        )
        for row in rows:
            if int(row["id"]) <= self._last_id:
                raise ValueError(f"results are not numbered: {row['id']} follows {self._last_id}")
            self._last_id = int(row["id"])
            self._add(row)
        epoch = db.execute("SELECT coalesce(max(epoch), 0) FROM epochs").fetchone()[0]
        ended = db.execute("SELECT coalesce(max(number), 0) FROM outcomes").fetchone()[0]
        is_changed = self._last_id != first_id or (epoch, ended) != (self._last_epoch, self._last_ended)
        self._last_epoch, self._last_ended = int(epoch), int(ended)
        return self._note_problem(self._bad_rows) or is_changed

    def _add(self, row: sqlite3.Row) -> None:
        stage = _STAGE_NUMBERS.get(str(row["stage"]))
        if stage is None:
            return
        try:
            time, seconds, number = float(row["time"]), float(row["seconds"]), int(row["number"])
            if not (0 <= seconds < _MAX_SECONDS and 0 <= number < _MAX_NUMBER):
                raise ValueError("a number is out of range")
        except (TypeError, ValueError, OverflowError, OSError) as error:
            self._bad_rows = self._bad_rows or f"{self.path} has results that cannot be read, the first is {row['id']}: {error}"
            return
        columns = self.columns
        with self._lock:
            if len(columns.times) >= _MAX_STAGES:
                columns.forget(_MAX_STAGES // 2)
            columns.times.append(time)
            columns.numbers.append(number)
            columns.stages.append(stage)
            columns.seconds.append(seconds)
            columns.is_done.append(row["status"] == StageStatus.DONE)
            columns.is_undo.append(bool(row["is_undo"]))


def stage_number(stage: Stage) -> int:
    return _STAGE_NUMBERS[stage]


_PAGE = """
SELECT number, epoch, request_id, origin, target, start_time, outcomes.status AS status, policy_version, seconds,
    error_reason, error_message
FROM changeovers LEFT JOIN outcomes USING (number)
WHERE number < :before AND (NOT :only_failed OR outcomes.status = 'FAILED'
    OR number IN (SELECT number FROM stages JOIN results USING (id) WHERE results.status != 'DONE'))
ORDER BY number DESC LIMIT :limit
"""
_STAGES = """
SELECT number, stage, is_undo, stages.time AS begun, results.status AS status, seconds, bytes, error_reason, error_message
FROM stages LEFT JOIN results USING (id) WHERE number IN (SELECT value FROM json_each(?)) ORDER BY id
LIMIT 20000
"""
_COUNTS = """
SELECT outcomes.status, epoch >= :first, count(*) FROM outcomes JOIN changeovers USING (number) GROUP BY 1, 2 LIMIT 100
"""


def page(
    journal: Path, *, before: int | None = None, limit: int = 50, only_failed: bool = False, restarts_now: int | None = None
) -> dict[str, Any]:
    """Changeovers, newest first, numbered below `before`; `next` continues. Raises InvalidArgument for an unreadable journal.

    `problem` names the first row that cannot be read; such rows are left out.

    restarts_now: of the coordinator since the node's last start, each an epoch of the journal; None if unknown.
    """
    limit, before = max(1, min(limit, _MAX_PAGE)), _MAX_NUMBER if before is None else max(0, min(before, _MAX_NUMBER))
    try:
        with open_journal(journal, within_s=QUERY_S) as db:
            db.text_factory = lambda text: text[:_MAX_CHARS].decode(errors="replace")
            db.execute("BEGIN")  # one snapshot for all
            rows = db.execute(_PAGE, {"before": before, "only_failed": only_failed, "limit": limit}).fetchall()
            counted = _counted(db, restarts_now)
            stages = db.execute(
                _STAGES, (json.dumps([row["number"] for row in rows if isinstance(row["number"], int)]),)
            ).fetchall()
    except (sqlite3.Error, OSError, TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument("journal", f"{journal} cannot be read: {error}") from error
    found: dict[int, dict[str, Any]] = {}
    problem = ""
    for read, each in [*((_changeover, row) for row in rows), *((_stage, row) for row in stages)]:
        try:
            read(each, found)
        except (TypeError, ValueError, OverflowError) as error:
            problem = problem or f"{journal} has rows that cannot be read, the first of changeover {each['number']}: {error}"
    last = rows[-1]["number"] if len(rows) == limit else None
    return {"changeovers": list(found.values()), "next": last if isinstance(last, int) else None, "problem": problem, **counted}


def _counted(db: sqlite3.Connection, restarts_now: int | None) -> dict[str, Any]:
    """counts: by outcome. counts_now: of them, since the node's last start; None if unknown, or if there was one start only."""
    begun = db.execute("SELECT epoch, start_time FROM epochs ORDER BY epoch LIMIT 1").fetchone()
    of_start = "SELECT epoch FROM epochs ORDER BY epoch DESC LIMIT 1 OFFSET ?"
    row = None if restarts_now is None else db.execute(of_start, (restarts_now,)).fetchone()
    first = 0 if row is None or row["epoch"] == begun["epoch"] else int(row["epoch"])
    counts, counts_now = Counter[str](), Counter[str]()
    for status, is_now, count in db.execute(_COUNTS, {"first": first}):
        counts[str(status)] += int(count)
        counts_now[str(status)] += int(count) if is_now else 0
    return {
        "counts": counts,
        "counts_now": counts_now if first else None,
        "since": _seconds(begun["start_time"]) if begun else None,
    }


def _changeover(row: sqlite3.Row, found: dict[int, dict[str, Any]]) -> None:
    number, version = int(row["number"]), row["policy_version"]
    found[number] = {
        "number": number,
        "id": id_text(number),
        "epoch": int(row["epoch"]),
        **{name: str(row[name]) for name in ("request_id", "origin", "target")},
        "start_time": _seconds(row["start_time"]),
        "policy_version": version if isinstance(version, int) else None,
        **_result(row),
        "stages": [],
    }


def _stage(row: sqlite3.Row, found: dict[int, dict[str, Any]]) -> None:
    """Adds a stage to its changeover, unless that could not be read."""
    stage = {
        "stage": str(row["stage"]),
        "is_undo": bool(row["is_undo"]),
        "time": _seconds(row["begun"]),
        "bytes": int(row["bytes"] or 0),
        **_result(row),
    }
    if (changeover := found.get(int(row["number"]))) is not None:
        changeover["stages"].append(stage)


def _result(row: sqlite3.Row) -> dict[str, Any]:
    """How a changeover or a stage has ended, as far as it has."""
    return {
        "status": str(row["status"] or StageStatus.STARTED),
        "seconds": _seconds(row["seconds"] or 0),
        **{name: str(row[name] or "") for name in ("error_reason", "error_message")},
    }


def _seconds(value: object) -> float:
    """A duration or a Unix time. Raises ValueError if it is neither."""
    seconds = float(str(value))
    if not 0 <= seconds < _MAX_SECONDS:
        raise ValueError(f"{seconds:g} seconds are out of range")
    return seconds
