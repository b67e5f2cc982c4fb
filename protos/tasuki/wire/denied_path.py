"""Paths that this process's user has no permission for."""

import fcntl
import os
import pwd
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tasuki.wire.errors import PathPermissionDenied


def denied(path: Path, *, key: str = "") -> PathPermissionDenied:
    """The error for `path`, with the user and the file or folder to change. key: the setting or field that names the path."""
    prefix, user = f"{key}: " if key else "", _user()
    return PathPermissionDenied(
        f"{prefix}{path}: permission denied for user {user}; {what_to_change(path)}", path=path, user=user
    )


def what_to_change(path: Path) -> str:
    """What to do about a path that this user may not read or write."""
    cause = _cause(path)
    for place in (path.absolute(), cause):
        if flags := _flags(place) & (_IMMUTABLE | _APPEND_ONLY):
            return (
                f"{place} has been made {_FLAGS[flags]}: `chattr -{'i' if flags & _IMMUTABLE else 'a'} {place}` allows it again"
            )
    with suppress(OSError):
        if os.statvfs(cause).f_flag & os.ST_RDONLY:
            return f"the file system of {cause} is mounted read-only"
    if os.geteuid() == 0:  # whom no mode stops
        return f"the file system of {cause}, or a container without CAP_DAC_OVERRIDE, refuses even root (NFS: root_squash)"
    return f"change the mode or owner of {cause}, or run as another user"


@contextmanager
def named_if_denied(path: Path, *, key: str = "") -> Iterator[None]:
    """Converts a PermissionError in the block to PathPermissionDenied for its file, or else for `path`."""
    try:
        yield
    except PermissionError as error:
        raise denied(Path(os.fsdecode(error.filename or path)), key=key) from error


_FS_IOC_GETFLAGS = 0x80086601
_IMMUTABLE, _APPEND_ONLY = 0x10, 0x20
_FLAGS = {_IMMUTABLE: "immutable", _APPEND_ONLY: "append-only", _IMMUTABLE | _APPEND_ONLY: "immutable"}


def _flags(path: Path) -> int:
    """Attributes of a file or folder, as lsattr shows them; 0 where they cannot be read."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return struct.unpack("l", fcntl.ioctl(fd, _FS_IOC_GETFLAGS, struct.pack("l", 0)))[0]
        finally:
            os.close(fd)
    return 0


def _user() -> str:
    uid = os.geteuid()
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:  # as for any uid of a container
        return f"uid {uid}"


def _cause(path: Path) -> Path:
    """The first folder above `path` that cannot be entered; else `path`, or the folder in which it is to be created."""
    path = path.absolute()
    for folder in reversed(path.parents):
        if not os.access(folder, os.X_OK, effective_ids=True):
            return folder
    return path if os.path.lexists(path) else path.parent
