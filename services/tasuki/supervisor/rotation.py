"""What an earlier run left under a name that a new one needs."""

from __future__ import annotations

from pathlib import Path

KEPT_LOGS = 5
"""Earlier ones of each process's log."""


def rotate(path: Path, *, keep: int) -> None:
    """Renames "x.log" to "x.log.old", that one to "x.log.old.1" and so on; the oldest beyond `keep` is lost."""
    if not path.exists():
        return
    names = [path, *rotated_paths(path, keep=keep)]
    for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
        if newer.exists():
            newer.replace(older)


def rotated_paths(path: Path, *, keep: int) -> list[Path]:
    """Where earlier ones are, whether they are there or not, the newest first."""
    newest = path.with_name(f"{path.name}.old")
    return [newest, *(newest.with_name(f"{newest.name}.{number}") for number in range(1, keep))]
