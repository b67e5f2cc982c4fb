"""Disks without space."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasuki.wire.errors import NO_ROOM, DiskFull


@contextmanager
def disk_full_at(folder: Path) -> Iterator[None]:
    """Raises DiskFull naming the file, or else `folder`, for a write in the block that finds no space."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        path = folder if error.filename is None else error.filename
        raise DiskFull(
            f"{path} cannot be written: {error.strerror}; free space, or name a folder on another disk", path=path
        ) from error
