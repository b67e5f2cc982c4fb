"""Tables of the journal in SQLite. docs/changeover.md explains their rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from tasuki.wire.errors import InvalidArgument

TABLES = """
CREATE TABLE IF NOT EXISTS epochs (
    epoch INTEGER PRIMARY KEY AUTOINCREMENT,
    boot_id TEXT NOT NULL,
    start_time REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS changeovers (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    epoch INTEGER NOT NULL REFERENCES epochs,
    request_id TEXT NOT NULL UNIQUE,
    origin TEXT NOT NULL,
    target TEXT NOT NULL,
    start_time REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS outcomes (
    number INTEGER PRIMARY KEY REFERENCES changeovers,
    status TEXT NOT NULL,
    policy_version INTEGER,
    seconds REAL NOT NULL,
    error_reason TEXT NOT NULL,
    error_message TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS stages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    number INTEGER NOT NULL REFERENCES changeovers,
    stage TEXT NOT NULL,
    is_undo INTEGER NOT NULL,
    epoch INTEGER NOT NULL REFERENCES epochs,
    sequence INTEGER NOT NULL,
    request_id TEXT NOT NULL UNIQUE,
    trainer_boot_id TEXT NOT NULL,
    rollout_boot_id TEXT NOT NULL,
    time REAL NOT NULL,
    UNIQUE (epoch, sequence)
);
CREATE TABLE IF NOT EXISTS results (
    id INTEGER PRIMARY KEY REFERENCES stages,
    status TEXT NOT NULL,
    time REAL NOT NULL,
    seconds REAL NOT NULL,
    bytes INTEGER NOT NULL,
    answer BLOB NOT NULL,
    policy_version INTEGER,
    error_reason TEXT NOT NULL,
    error_message TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS fleets (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    time REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS stages_by_changeover ON stages (number);
"""
SCHEMA_VERSION = 2


def check_version(db: sqlite3.Connection, path: Path, *, key: str, known: Sequence[int] = (SCHEMA_VERSION,)) -> None:
    """Raises InvalidArgument for a journal of another version of tasuki. A new file has version 0."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version not in known:
        raise InvalidArgument(
            key,
            f"{path} has schema version {version}, this build reads {SCHEMA_VERSION}; use the version of tasuki that wrote it, or "
            "choose another folder",
            version=version,
        )
