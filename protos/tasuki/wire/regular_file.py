"""Opens files in a folder named by a caller without ever blocking: all our files are regular."""

import errno
import os
import stat
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

_MAX_PATH_BYTES = 1 << 14


def open_regular(path: Path) -> BufferedReader:
    """Opens `path` for reading, following links. Raises OSError if it is missing or not a regular file."""
    check_regular(path)  # to open a device may be enough to change it
    # If it is a FIFO by now, opening it without O_NONBLOCK would wait for a writer forever. Regular files are unaffected.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(fd), path)
        return BufferedReader(_File(fd))
    except BaseException:
        os.close(fd)
        raise


def check_regular(path: Path) -> None:
    """Raises OSError if `path` is missing or not a regular file, for libraries that open files by their path."""
    _check(path.stat(), path)


def read_regular(path: Path, *, max_bytes: int | None = None) -> bytes:
    """Reads the content of `path`. Raises as open_regular, and OSError if it is larger than `max_bytes`."""
    with open_regular(path) as file:
        content = file.read() if max_bytes is None else file.read(max_bytes + 1)
    if max_bytes is not None and len(content) > max_bytes:
        raise OSError(errno.EINVAL, f"is larger than {max_bytes} bytes", str(path))
    return content


def read_path(path: Path) -> Path:
    """Reads the path that the file `path` contains. Raises as read_regular, and OSError if it contains none."""
    content = read_regular(path, max_bytes=_MAX_PATH_BYTES).strip()
    if not content or b"\0" in content:
        raise OSError(errno.EINVAL, "contains no path", str(path))
    return Path(os.fsdecode(content))


class _File(FileIO):
    """Fails where a file of the kernel's, such as /proc/kmsg, has nothing to read yet; BufferedReader would return None."""

    def readinto(self, buffer: Any) -> int:
        num_bytes = super().readinto(buffer)
        if num_bytes is None:
            raise OSError(errno.EINVAL, "is not a regular file")
        return num_bytes


def _check(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def unreadable(path: Path, error: OSError) -> str:
    """A line that says why `path` cannot be read; empty if it is missing."""
    return "" if isinstance(error, FileNotFoundError) else f"{path} cannot be read: {error.strerror}"
