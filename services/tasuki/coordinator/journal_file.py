"""Tables of a journal, and how a running or ended node's, or a copy, is opened for reading. docs/design/changeover.md explains the rows."""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tasuki.wire.regular_file import check_regular, open_regular

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
_MAX_VALUE_BYTES = 64_000_000
_NUM_INSTRUCTIONS = 10_000
"""Instructions of SQLite between two checks of the time limit."""


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


@contextmanager
def open_journal(path: Path, *, busy_s: float = 5.0, within_s: float | None = None) -> Iterator[sqlite3.Connection]:
    """A read-only connection. With a write-ahead log, readers and the writer do not block each other.

    busy_s: longest wait for a locked file. within_s: time limit of queries. Raises sqlite3.Error, and OSError if the file is
    missing or not regular.
    """
    check_regular(path)
    beside = [path.with_name(f"{path.name}-{part}") for part in ("wal", "shm", "journal")]
    for part in beside:
        with suppress(FileNotFoundError):
            check_regular(part)
    # Without a write-ahead log there is no writer, and reading need not create files next to it.
    options = "mode=ro" if beside[0].exists() else "mode=ro&immutable=1"
    uri = f"{path.resolve().as_uri()}?{options}"
    with closing(sqlite3.connect(uri, uri=True, timeout=busy_s, isolation_level=None)) as db:
        db.row_factory = sqlite3.Row
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        if within_s is not None:
            end = time.monotonic() + within_s
            db.set_progress_handler(lambda: time.monotonic() > end, _NUM_INSTRUCTIONS)
        # A view may yield endless rows.
        foreign = db.execute("SELECT name FROM sqlite_master WHERE type = 'view' OR sql LIKE 'CREATE VIRTUAL%'").fetchone()
        if foreign is not None:
            raise sqlite3.DatabaseError(f"{foreign['name']} is not a table")
        yield db


@contextmanager
def open_snapshot(path: Path) -> Iterator[sqlite3.Connection]:
    """One snapshot of all tables, for an audit.

    Raises PathNotFound, and InvalidArgument for a file that cannot be read or, as the block's ValueErrors say, understood.
    """
    with named_if_denied(path, key="journal"):
        if not path.is_file():
            raise PathNotFound(f"there is no journal at {path}", path=path)
        open_regular(path).close()  # SQLite's error for a denied file is that of a missing one
    try:
        with open_journal(path) as db:
            check_version(db, path, key="journal")
            damage = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if damage != "ok":
                raise InvalidArgument("journal", f"{path} is damaged: {damage}", path=path)
            db.execute("BEGIN")
            yield db
    except (sqlite3.Error, OSError) as error:
        raise InvalidArgument("journal", f"{path} cannot be read: {error}", path=path) from error
    except ValueError as error:  # an unknown stage, phase or status, or a value that is no number
        raise InvalidArgument("journal", f"{path} holds what this build does not know: {error}", path=path) from error


def id_text(number: int) -> str:
    """Id of a changeover, such as "c000012"."""
    return f"c{number:06d}"


def id_number(changeover_id: str) -> int:
    """Number in a changeover's id."""
    return int(changeover_id.removeprefix("c"))
