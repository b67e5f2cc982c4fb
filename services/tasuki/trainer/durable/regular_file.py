"""Opens what lies in a folder that a caller names, and never waits for it: only regular files hold anything of ours."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """`path`, open for reading; a link counts as the file that it leads to. Raises OSError, also for whatever is no regular file."""
    # Without O_NONBLOCK the open of a FIFO waits for a writer, and nothing could end that. It changes nothing for a regular file.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_regular(path: Path) -> bytes:
    """The content of `path`. Raises as open_regular."""
    with open_regular(path) as file:
        return file.read()
