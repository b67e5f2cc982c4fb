"""Table `movements` of the journal: movements after stages' answers, written with their results."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasuki.coordinator.records import Outcome
from tasuki.memory.tags import MemoryTag, Movement, MovementKind

INSERT_MOVEMENT = "INSERT INTO movements VALUES (?, ?, ?, ?, ?, ?, ?)"
BEGUN, ENDED = "BEGUN", "ENDED"
"""Status of a row: the stage's answer said that it goes on, or that it has ended."""


@dataclass(frozen=True, slots=True)
class MovementRows:
    """Rows by the id of the stage whose answer reported them, and by status."""

    rows: Mapping[tuple[int, str], tuple[Movement, ...]]

    def begun(self, stage_id: int) -> tuple[Movement, ...]:
        return self.rows.get((stage_id, BEGUN), ())

    def ended(self, stage_id: int) -> tuple[Movement, ...]:
        return self.rows.get((stage_id, ENDED), ())


def movement_rows(stage_id: int, outcome: Outcome) -> list[Sequence[object]]:
    """Rows for INSERT_MOVEMENT."""
    told = ((BEGUN, outcome.begun), (ENDED, outcome.ended))
    return [
        (stage_id, one.kind, one.tag, status, one.num_bytes, one.seconds, one.end_time or None)
        for status, movements in told
        for one in movements
    ]


def read_movements(db: sqlite3.Connection, number: int | None = None) -> MovementRows:
    """Reads movements of a changeover, or of all. Raises ValueError for an unknown kind, tag or status, or a value that is no number."""
    query, values = "SELECT * FROM movements ORDER BY id", ()
    if number is not None:
        query, values = "SELECT * FROM movements WHERE id IN (SELECT id FROM stages WHERE number = ?)", (number,)
    rows: dict[tuple[int, str], tuple[Movement, ...]] = {}
    for row in db.execute(query, values):
        key = (row["id"], _status(row["status"]))
        rows[key] = (*rows.get(key, ()), _movement(row))
    return MovementRows(rows)


def _movement(row: sqlite3.Row) -> Movement:
    if not isinstance(row["bytes"], int) or not isinstance(row["seconds"], float):
        raise ValueError(f"{row['bytes']!r} and {row['seconds']!r} as bytes and seconds, where numbers belong")
    return Movement(
        MovementKind(row["kind"]), MemoryTag(row["tag"]), row["bytes"], seconds=row["seconds"], end_time=row["end_time"] or 0.0
    )


def _status(status: str) -> str:
    if status not in (BEGUN, ENDED):
        raise ValueError(f"{status!r} as the status of a movement")
    return status
