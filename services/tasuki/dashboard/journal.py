"""A node's journal: followed in columns, one row per finished stage, and read in pages of changeovers. Opened briefly, read-only."""

import json
import sqlite3
import threading
from array import array
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tasuki.coordinator.journal_file import id_text, open_journal
from tasuki.dashboard.followed import MALFORMED, Followed
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.stages import RING, Stage, StageStatus

_ROWS = 20_000
_BUSY_S = 0.2
_MAX_NUMBER = 2**53
_MAX_PAGE = 200
QUERY_S = 10.0
"""Time limit for the queries of one look at a journal."""
STAGES = [rule.stage for rule in RING]
_STAGE_NUMBERS = {str(stage): number for number, stage in enumerate(STAGES)}


@dataclass(slots=True)
class StageColumns:
    """One row per finished stage, in order. Times are Unix times in seconds."""

    times: "array[float]" = field(default_factory=lambda: array("d"))
    numbers: "array[int]" = field(default_factory=lambda: array("q"))
    """Number of the changeover."""
    stages: "array[int]" = field(default_factory=lambda: array("b"))
    """Index in STAGES."""
    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    is_done: "array[int]" = field(default_factory=lambda: array("b"))
    is_undo: "array[int]" = field(default_factory=lambda: array("b"))


class JournalTail(Followed):
    """The journal's stages. Other threads may call everything but `advance`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lock = threading.Lock()
        self._file: tuple[int, int] | None = None
        self.columns = StageColumns()

    def read_on(self) -> bool:
        status = self.path.stat()
        if (file := (status.st_dev, status.st_ino)) != self._file:
            with self._lock:
                self.columns = StageColumns()
            self._file, self._last_id, self._last_marks = file, 0, (0, -1)
        try:
            with open_journal(self.path, busy_s=_BUSY_S, within_s=QUERY_S) as db:
                rows = db.execute(
                    "SELECT id, number, stage, is_undo, status, results.time AS time, seconds"
                    " FROM results JOIN stages USING (id) WHERE id > ? ORDER BY id LIMIT ?",
                    (self._last_id, _ROWS),
                ).fetchall()
                epoch = db.execute("SELECT coalesce(max(epoch), 0) FROM epochs").fetchone()[0]
                ended = db.execute("SELECT coalesce(max(number), 0) FROM outcomes").fetchone()[0]
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                return False
            raise
        stages = [
            (
                row["time"] + 0.0,
                row["number"],
                _STAGE_NUMBERS[row["stage"]],
                row["seconds"] + 0.0,
                row["status"],
                row["is_undo"],
            )
            for row in rows
            if row["stage"] in _STAGE_NUMBERS
        ]
        with self._lock:
            for time, number, stage, seconds, status, is_undo in stages:
                values = (time, number, stage, seconds, status == StageStatus.DONE, is_undo)
                for column, value in zip(fields(self.columns), values, strict=True):
                    getattr(self.columns, column.name).append(value)
        before = self._last_id, self._last_marks
        self._last_id, self._last_marks = rows[-1]["id"] if rows else self._last_id, (epoch, ended)
        return (self._last_id, self._last_marks) != before

    def copied(self) -> StageColumns:
        """A copy of the current columns."""
        with self._lock:
            return StageColumns(*(getattr(self.columns, column.name)[:] for column in fields(self.columns)))

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
SELECT number, stage, is_undo, stages.time AS time, results.status AS status, seconds, bytes, error_reason, error_message
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

    restarts_now: of the coordinator since the node's last start, each an epoch of the journal; None if unknown.
    """
    limit, before = min(limit, _MAX_PAGE), _MAX_NUMBER if before is None else before
    try:
        with open_journal(journal, within_s=QUERY_S) as db:
            db.execute("BEGIN")  # one snapshot for all
            rows = db.execute(_PAGE, {"before": before, "only_failed": only_failed, "limit": limit}).fetchall()
            counted = _counted(db, restarts_now)
            stages = db.execute(_STAGES, (json.dumps([row["number"] for row in rows]),)).fetchall()
        found = {row["number"]: {**dict(row), "id": id_text(row["number"]), **_result(row), "stages": []} for row in rows}
        for row in stages:
            stage = {**dict(row), "is_undo": bool(row["is_undo"]), "bytes": row["bytes"] or 0, **_result(row)}
            found[row["number"]]["stages"].append(stage)
    except (OSError, *MALFORMED) as error:
        raise InvalidArgument("journal", f"{journal} cannot be read: {error}") from error
    return {"changeovers": list(found.values()), "next": rows[-1]["number"] if len(rows) == limit else None, **counted}


def _counted(db: sqlite3.Connection, restarts_now: int | None) -> dict[str, Any]:
    """counts: by outcome. counts_now: of them, since the node's last start; None if unknown, or if there was one start only."""
    begun = db.execute("SELECT epoch, start_time FROM epochs ORDER BY epoch LIMIT 1").fetchone()
    of_start = "SELECT epoch FROM epochs ORDER BY epoch DESC LIMIT 1 OFFSET ?"
    row = None if restarts_now is None else db.execute(of_start, (restarts_now,)).fetchone()
    first = 0 if row is None or row["epoch"] == begun["epoch"] else row["epoch"]
    counts, counts_now = Counter[str](), Counter[str]()
    for status, is_now, count in db.execute(_COUNTS, {"first": first}):
        counts[status] += count
        counts_now[status] += count if is_now else 0
    since = begun["start_time"] if begun else None
    return {"counts": counts, "counts_now": counts_now if first else None, "since": since}


def _result(row: sqlite3.Row) -> dict[str, Any]:
    """How a changeover or a stage has ended, as far as it has."""
    return {
        "status": row["status"] or StageStatus.STARTED,
        "seconds": row["seconds"] or 0,
        **{name: row[name] or "" for name in ("error_reason", "error_message")},
    }
