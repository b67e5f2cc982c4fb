"""File locks held by a node while it lives. The kernel frees them when the last process that shares one ends."""

import fcntl
import os
import time
from pathlib import Path

_TRIES = 5
_TRY_EVERY_S = 0.01


def try_lock(fd: int, operation: int) -> bool:
    """Whether the lock was taken. Retries briefly, because checking a lock takes it for an instant."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_TRY_EVERY_S)
        else:
            return True
    return False


def is_free(path: Path) -> bool:
    """Whether an existing file is unlocked. False if the file cannot be seen from here."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)
