"""Opens a journal read-only: of a running or ended node, or a copy."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from tasuki.wire.regular_file import check_regular

_MAX_VALUE_BYTES = 64_000_000
_NUM_INSTRUCTIONS = 10_000
"""Instructions of SQLite between two checks of the time limit."""


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
