"""Owner of a file: the user who could have put it in its place."""

import os
import stat
from pathlib import Path

_ROOT = 0


def is_foreign(path: Path) -> bool:
    """Whether a user other than root and this process's owns `path` itself, which may be a link. Raises OSError."""
    return path.lstat().st_uid not in (_ROOT, os.geteuid())


def is_planted(path: Path) -> bool:
    """Whether another user has put `path` into a folder that every user can write to, such as /tmp. Raises OSError."""
    return bool(path.absolute().parent.stat().st_mode & stat.S_IWOTH) and is_foreign(path)
