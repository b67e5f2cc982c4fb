"""Who may use a state folder: one holder for each lock, until it ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from tasuki.wire.errors import NodeRunning


class StateLock:
    """An flock on `name`.lock in the state folder, with the holder's pid inside. Children that inherit it share it."""

    def __init__(self, state_dir: Path, *, name: str) -> None:
        """Raises NodeRunning, naming the holder's pid, when someone else holds it."""
        state_dir.mkdir(parents=True, exist_ok=True)
        self.path = state_dir / f"{name}.lock"
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(self.fd, 32).decode() or "unknown"
            os.close(self.fd)
            raise NodeRunning(f"pid {pid} already runs a {name} on {state_dir}", state_dir=state_dir, pid=pid) from None
        self.sign(os.getpid())

    def sign(self, pid: int) -> None:
        """Puts `pid` into the file, for those who ask who holds it."""
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, str(pid).encode(), 0)

    def close(self) -> None:
        """Closes this process's descriptor; the lock is free when every process that shares it has done so."""
        os.close(self.fd)

    def __enter__(self) -> StateLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def holder(state_dir: Path, *, name: str) -> int | None:
    """Pid of the process that holds the lock; None when nobody does."""
    try:
        StateLock(state_dir, name=name).close()
    except NodeRunning as error:
        return int(error.metadata["pid"]) if error.metadata["pid"].isdigit() else 0
    return None
