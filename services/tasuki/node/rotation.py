"""Rotates files that an earlier run left under a name in use."""

from __future__ import annotations

from pathlib import Path

KEPT_LOGS = 5
"""Number of earlier logs kept for each process."""


def rotate(path: Path, *, keep: int) -> None:
    """Renames "x.log" to "x.log.old", that to "x.log.old.1" and so on; deletes the oldest beyond `keep`."""
    if not path.exists():
        return
    names = [path, *rotated_paths(path, keep=keep)]
    for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
        if newer.exists():
            newer.replace(older)


def rotated_paths(path: Path, *, keep: int) -> list[Path]:
    """Paths of earlier files, whether they exist or not, newest first."""
    newest = path.with_name(f"{path.name}.old")
    return [newest, *(newest.with_name(f"{newest.name}.{number}") for number in range(1, keep))]
