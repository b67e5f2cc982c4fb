"""Locks on a state folder, held until their holder ends, however it ends, and the id of one start of its node."""

import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tasuki.config.paths import socket_dir
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import NO_ROOM, DiskFull, InvalidArgument, NodeRunning
from tasuki.wire.flock import try_lock

NODE_LOCK = "node"
"""Lock held by a node's supervisor while any process of the node lives."""
TRAINING_LOCK = "training"
"""Lock held by `tasuki train` on its output folder and on its node's state folder."""

_PID_BYTES = 20
_INSTANCE = "instance"


class StateLock:
    """An flock on `name`.lock in the state folder; the file contains the holder's pid. Children that inherit it share it."""

    def __init__(self, fd: int) -> None:
        """Wraps a descriptor that holds the lock."""
        self.fd = fd

    @classmethod
    def take(cls, state_dir: Path, *, name: str, key: str = "state_dir") -> "StateLock":
        """Takes the lock, in a folder that it creates if needed.

        key: of the configuration, which names the folder. Raises NodeRunning with the holder's pid if the lock is held, InvalidArgument
        naming the key if the folder cannot be created or written, PathPermissionDenied, DiskFull without space.
        """
        try:
            with disk_full_at(state_dir), named_if_denied(state_dir, key=key):
                for folder in (*reversed(state_dir.parents), state_dir):
                    if not folder.exists():  # `parents=True` would create those with the umask's mode
                        folder.mkdir(mode=0o700, exist_ok=True)
                fd = os.open(lock_path(state_dir, name=name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if error.errno == errno.ELOOP:  # the holder's pid would be written to wherever a link points
                raise _not_regular(state_dir, name=name, key=key) from error
            problem = f"{error.filename} cannot be created: {error.strerror}; name a folder that you can write to"
            raise InvalidArgument(key, problem) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise _not_regular(state_dir, name=name, key=key)
        if not try_lock(fd, fcntl.LOCK_EX):
            pid = os.pread(fd, _PID_BYTES, 0).decode().strip() or "unknown"
            os.close(fd)
            raise NodeRunning(f"pid {pid} already runs a {name} on {state_dir}", state_dir=state_dir, pid=pid)
        lock = cls(fd)
        try:
            with disk_full_at(state_dir):
                lock.sign(os.getpid())
        except BaseException:
            lock.close()
            raise
        return lock

    def sign(self, pid: int) -> None:
        """Writes `pid` to the file as the holder's."""
        # Overwrites in place: readers always find a pid, and it works on a full disk.
        os.pwrite(self.fd, f"{pid:<{_PID_BYTES}}".encode(), 0)

    def close(self) -> None:
        """Closes this process's descriptor. The lock is released once every process that shares it has done so."""
        os.close(self.fd)

    def __enter__(self) -> "StateLock":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _not_regular(state_dir: Path, *, name: str, key: str) -> InvalidArgument:
    return InvalidArgument(key, f"{lock_path(state_dir, name=name)} is not a regular file; remove it")


def lock_path(state_dir: Path, *, name: str) -> Path:
    return state_dir / f"{name}.lock"


def holder(state_dir: Path, *, name: str) -> int | None:
    """Pid of the lock's holder, or None."""
    path = lock_path(state_dir, name=name)
    if not path.is_file():
        return None
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return None if try_lock(fd, fcntl.LOCK_SH) else int(os.pread(fd, _PID_BYTES, 0) or 0)
    finally:
        os.close(fd)


@contextmanager
def disk_full_at(folder: Path) -> Iterator[None]:
    """Raises DiskFull naming the file, or else `folder`, for a write in the block that finds no space."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        path = folder if error.filename is None else error.filename
        text = f"{path} cannot be written: {error.strerror}; free space, or name a folder on another disk"
        raise DiskFull(text, path=path) from error


@dataclass(frozen=True, slots=True)
class Instance:
    """One start of a node. Both fields are empty if the services were started individually."""

    id: str = ""
    lock_path: str = ""


def begin_instance(state_dir: Path) -> None:
    """Creates the id of a starting node. Processes that restart within the node find the same one."""
    (socket_dir(state_dir) / _INSTANCE).write_text(uuid.uuid4().hex)


def read_instance(state_dir: Path) -> Instance:
    """Reads the id of the node running in the folder. Ignores what a killed node left behind."""
    path = socket_dir(state_dir) / _INSTANCE
    if not path.exists() or holder(state_dir, name=NODE_LOCK) is None:
        return Instance()
    return Instance(path.read_text(), str(lock_path(state_dir.absolute(), name=NODE_LOCK)))
