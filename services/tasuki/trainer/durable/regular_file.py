"""Opens files in a folder named by a caller without ever blocking: all our files are regular."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """Opens `path` for reading, following links. Raises OSError if it is missing or not a regular file."""
    # Without O_NONBLOCK, opening a FIFO would wait for a writer forever. Regular files are unaffected.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_regular(path: Path) -> bytes:
    """Reads the content of `path`. Raises as open_regular."""
    with open_regular(path) as file:
        return file.read()
