"""A node's journal: followed, and read in pages of changeovers. Opened briefly, read-only."""

import json
import sqlite3
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasuki.coordinator.journal_file import id_text, open_journal
from tasuki.dashboard.places import MALFORMED, Followed
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.stages import StageStatus

_BUSY_S = 0.2
_MAX_NUMBER = 2**53
QUERY_S = 10.0
"""Time limit for the queries of one look at a journal."""


class JournalTail(Followed):
    """Notices new rows, and reads the last ones when asked: none of a journal that cannot be read, which `problem` tells."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._marks: tuple[int, ...] = ()

    def read_on(self) -> bool:
        status = self.path.stat()
        try:
            with open_journal(self.path, busy_s=_BUSY_S, within_s=QUERY_S) as db:
                marks = (status.st_dev, status.st_ino, *db.execute(_MARKS).fetchone())
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                return False
            raise
        is_new, self._marks = marks != self._marks, marks
        return is_new

    def finished_stages(self, *, changeovers: int) -> list[sqlite3.Row]:
        """Results of stages in the last changeovers, in order: stage, time, and whether the node has been at the stage since."""
        return self._rows(_FINISHED, (StageStatus.DONE, changeovers))

    def last_seconds(self) -> dict[str, float]:
        """Seconds of each stage when it last succeeded."""
        return {row["stage"]: row["seconds"] for row in reversed(self._rows(_SUCCEEDED, (StageStatus.DONE,)))}

    def _rows(self, query: str, values: Sequence[object]) -> list[sqlite3.Row]:
        try:
            with open_journal(self.path, within_s=QUERY_S) as db:
                return db.execute(query, values).fetchall()
        except (OSError, *MALFORMED):
            return []


_MARKS = """
SELECT (SELECT coalesce(max(id), 0) FROM results), (SELECT coalesce(max(epoch), 0) FROM epochs),
    (SELECT coalesce(max(number), 0) FROM outcomes)
"""
_FINISHED = """
SELECT stage, results.time AS time, status = ? AND NOT is_undo AS is_done FROM results JOIN stages USING (id)
WHERE number > (SELECT coalesce(max(number), 0) FROM stages) - ? AND typeof(results.time) = 'real' ORDER BY id
"""
_SUCCEEDED = "SELECT stage, seconds FROM results JOIN stages USING (id) WHERE status = ? ORDER BY id DESC LIMIT 1000"
_PAGE = """
SELECT number, epoch, request_id, origin, target, start_time, outcomes.status AS status, policy_version, seconds,
    error_reason, error_message
FROM changeovers LEFT JOIN outcomes USING (number)
WHERE number < :before AND (NOT :only_failed OR outcomes.status = 'FAILED'
    OR number IN (SELECT number FROM stages JOIN results USING (id) WHERE results.status = 'FAILED'))
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
    before = _MAX_NUMBER if before is None else before
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
