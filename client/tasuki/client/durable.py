"""Small files that are written whole or not at all, even if the machine crashes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tasuki.wire.errors import NO_ROOM, DiskFull


@contextmanager
def named_if_full(path: Path) -> Iterator[None]:
    """Converts a full disk to DiskFull naming `path` and adds `path` to any other OSError: writes to open files name none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        if error.errno not in NO_ROOM:
            raise
        raise DiskFull(f"{path} cannot be written: {error.strerror}; free space and continue", path=path) from error


def open_private(path: Path, mode: str) -> IO[Any]:
    """Opens a file for writing; one that does not exist yet gets no permissions for other users."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def write_durably(path: Path, text: str) -> None:
    """Replaces a file atomically by one for this user alone: writes aside, fsyncs, renames. Raises DiskFull, or OSError."""
    aside = path.with_name(f".{path.name}.partial")
    aside.unlink(missing_ok=True)  # it may be a FIFO, which would wait for a reader
    try:
        with named_if_full(path), open_private(aside, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except (OSError, DiskFull):
        aside.unlink(missing_ok=True)  # a leftover would keep a full disk full
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
