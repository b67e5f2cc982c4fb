"""Rotates files that an earlier run left under a name in use, and logs that grow."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

KEPT_LOGS = 5
"""Number of earlier logs kept for each process."""
LOG_BYTES = 100_000_000
"""Size at which the log of a running service is rotated."""


def rotate(path: Path, *, keep: int) -> None:
    """Renames "x.log" to "x.log.old", that to "x.log.old.1" and so on; deletes the oldest beyond `keep`."""
    if not path.exists():
        return
    names = [path, *rotated_paths(path, keep=keep)]
    for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
        if newer.exists():
            newer.replace(older)


def rotate_open(path: Path, *, keep: int, limit_bytes: int = LOG_BYTES) -> None:
    """Rotates a log of `limit_bytes` or more whose writers have it open for appending, and keep it.

    It is copied, then emptied: lines written in between are lost, and all of them if the disk is full.
    """
    if not path.exists() or path.stat().st_size < limit_bytes:
        return
    copy = path.with_name(f"{path.name}.copy")
    with suppress(OSError):
        shutil.copy(path, copy)
        rotate(path, keep=keep)
        path.with_name(f"{path.name}.old").rename(path)
        copy.rename(path.with_name(f"{path.name}.old"))
    copy.unlink(missing_ok=True)
    os.truncate(path, 0)


def rotated_paths(path: Path, *, keep: int) -> list[Path]:
    """Paths of earlier files, whether they exist or not, newest first."""
    newest = path.with_name(f"{path.name}.old")
    return [newest, *(newest.with_name(f"{newest.name}.{number}") for number in range(1, keep))]
