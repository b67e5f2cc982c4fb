"""Small files that are there whole or not at all, also after the machine has crashed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasuki.wire.errors import NO_ROOM, DiskFull


@contextmanager
def named_if_full(path: Path) -> Iterator[None]:
    """Raises DiskFull naming `path`, or the OSError with it: what the system says of a write to an open file names none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        if error.errno not in NO_ROOM:
            raise
        raise DiskFull(f"{path} cannot be written: {error.strerror}; make room, and go on", path=path) from error


def write_durably(path: Path, text: str) -> None:
    """Writes aside, fsyncs and renames; what was at `path` is there until then. Raises DiskFull, or OSError."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        with named_if_full(path), aside.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except (OSError, DiskFull):
        aside.unlink(missing_ok=True)  # on a full disk it would be in the way of everything else
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
