"""Pages of changeovers with their stages, failures and causes, and restarts of services."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tasuki.cli.dashboard.journal_tail import reading
from tasuki.coordinator.records import Status, id_text
from tasuki.wire.errors import InvalidArgument

_MAX_PAGE = 200
_MAX_NUMBER = 2**63 - 1
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
"""
_LOG_BYTES = 2_000_000
_MAX_RESTARTS = 200
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) .*? event=(\w+) (.*)")
_FIELD = re.compile(r"(\w+)=(.*?)(?= \w+=|$)")


def page(journal: Path, *, before: int | None = None, limit: int = 50, only_failed: bool = False) -> dict[str, Any]:
    """Changeovers, newest first, numbered below `before`; `next` continues. Raises InvalidArgument for an unreadable journal."""
    limit, before = max(1, min(limit, _MAX_PAGE)), _MAX_NUMBER if before is None else max(0, min(before, _MAX_NUMBER))
    try:
        with reading(journal) as db:
            db.execute("BEGIN")  # one snapshot for all
            rows = db.execute(_PAGE, {"before": before, "only_failed": only_failed, "limit": limit}).fetchall()
            counts = {str(row[0]): int(row[1]) for row in db.execute("SELECT status, count(*) FROM outcomes GROUP BY status")}
            stages = _stages(db, [int(row["number"]) for row in rows])
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise InvalidArgument("journal", f"{journal} cannot be read: {error}") from error
    return {
        "changeovers": [_changeover(row, stages.get(int(row["number"]), [])) for row in rows],
        "next": int(rows[-1]["number"]) if len(rows) == limit else None,
        "counts": counts,
    }


def _stages(db: sqlite3.Connection, numbers: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    rows = db.execute(_STAGES, (json.dumps(numbers),))
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(int(row["number"]), []).append(
            {
                "stage": str(row["stage"]),
                "is_undo": bool(row["is_undo"]),
                "time": float(row["begun"]),
                "status": str(row["status"] or Status.STARTED),
                "seconds": float(row["seconds"] or 0),
                "bytes": int(row["bytes"] or 0),
                "error_reason": str(row["error_reason"] or ""),
                "error_message": str(row["error_message"] or ""),
            }
        )
    return found


def _changeover(row: sqlite3.Row, stages: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "number": int(row["number"]),
        "id": id_text(int(row["number"])),
        "epoch": int(row["epoch"]),
        "request_id": str(row["request_id"]),
        "origin": str(row["origin"]),
        "target": str(row["target"]),
        "start_time": float(row["start_time"]),
        "status": str(row["status"] or Status.STARTED),
        "policy_version": row["policy_version"] if isinstance(row["policy_version"], int) else None,
        "seconds": float(row["seconds"] or 0),
        "error_reason": str(row["error_reason"] or ""),
        "error_message": str(row["error_message"] or ""),
        "stages": stages,
    }


def restarts(log: Path) -> list[dict[str, Any]]:
    """Restarts of services with their causes, newest first, from the supervisor's log; empty without one."""
    causes: dict[str, str] = {}
    found: list[dict[str, Any]] = []
    for time, event, fields in _log_events(log):
        service = fields.get("service") or fields.get("process", "").rstrip("0123456789").replace("scheduler", "rollout")
        if event == "ended":
            causes[service] = _ended(fields.get("exit_code", ""))
        elif event in ("stalled", "lost", "restart_asked"):
            causes[service] = fields.get("cause", event)
        elif event == "restart":
            cause = causes.pop(service, "")
            found.append({"time": time, "service": service, "number": fields.get("number", ""), "cause": cause})
    return found[::-1][:_MAX_RESTARTS]


def _ended(exit_code: str) -> str:
    return f"killed by signal {exit_code[1:]}" if exit_code.startswith("-") else f"ended with exit code {exit_code}"


def _log_events(log: Path) -> Iterator[tuple[float, str, dict[str, str]]]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_BYTES))
            text = file.read(_LOG_BYTES).decode(errors="replace")
    except OSError:
        return
    for match in map(_LOG_LINE.match, text.splitlines()):
        if match is not None:
            # The log uses the machine's local time.
            moment = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(match[2]) / 1000  # noqa: DTZ007
            yield moment, match[3], dict(_FIELD.findall(match[4]))
