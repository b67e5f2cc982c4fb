"""Pages of changeovers with their stages, failures and causes."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

from tasuki.coordinator.journal_file import id_text, open_journal
from tasuki.dashboard.journal_tail import QUERY_S
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.stages import StageStatus

_MAX_PAGE = 200
_MAX_CHARS = 4_000
_MAX_NUMBER = 2**63 - 1
# Times of the year 5138 and earlier.
_MAX_SECONDS = 1e11
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
    number = int(row["number"])
    found[number] = {
        "number": number,
        "id": id_text(number),
        "epoch": int(row["epoch"]),
        "request_id": str(row["request_id"]),
        "origin": str(row["origin"]),
        "target": str(row["target"]),
        "start_time": _seconds(row["start_time"]),
        "status": str(row["status"] or StageStatus.STARTED),
        "policy_version": row["policy_version"] if isinstance(row["policy_version"], int) else None,
        "seconds": _seconds(row["seconds"] or 0),
        "error_reason": str(row["error_reason"] or ""),
        "error_message": str(row["error_message"] or ""),
        "stages": [],
    }


def _stage(row: sqlite3.Row, found: dict[int, dict[str, Any]]) -> None:
    """Adds a stage to its changeover, unless that could not be read."""
    stage = {
        "stage": str(row["stage"]),
        "is_undo": bool(row["is_undo"]),
        "time": _seconds(row["begun"]),
        "status": str(row["status"] or StageStatus.STARTED),
        "seconds": _seconds(row["seconds"] or 0),
        "bytes": int(row["bytes"] or 0),
        "error_reason": str(row["error_reason"] or ""),
        "error_message": str(row["error_message"] or ""),
    }
    if (changeover := found.get(int(row["number"]))) is not None:
        changeover["stages"].append(stage)


def _seconds(value: object) -> float:
    """A duration or a Unix time. Raises ValueError if it is neither."""
    seconds = float(str(value))
    if not 0 <= seconds < _MAX_SECONDS:
        raise ValueError(f"{seconds:g} seconds are out of range")
    return seconds
