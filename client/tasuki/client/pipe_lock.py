"""Locks for worker processes that leave nothing in /dev/shm when processes are killed."""

from __future__ import annotations

import os
import select
import threading
import time
from multiprocessing import synchronize
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Any, cast


class PipeLock:
    """A token in a pipe: whoever took it holds the lock. Can be passed to a child process as an argument.

    multiprocessing's own locks are files in /dev/shm with random names. If all processes of a run are killed at once, the files remain
    and cannot be attributed. A pipe disappears with its processes. The lock is reentrant: its holder may take it again.
    """

    def __init__(self, pipe: tuple[Connection, Connection]) -> None:
        """pipe: reading and writing ends of a new pipe."""
        self._reader, self._writer = pipe
        os.set_blocking(self._reader.fileno(), False)  # two readers may both see the token; one then reads nothing
        self._holder, self._num_taken = 0, 0
        self._put_token()

    def __getstate__(self) -> tuple[Connection, Connection]:
        return self._reader, self._writer

    def __setstate__(self, pipe: tuple[Connection, Connection]) -> None:
        self._reader, self._writer = pipe
        self._holder, self._num_taken = 0, 0

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Returns False if the lock was not free in time. timeout: seconds; None waits forever."""
        if self._holder != threading.get_ident():
            if not self._take_token(timeout if block else 0.0):
                return False
            self._holder = threading.get_ident()
        self._num_taken += 1
        return True

    def release(self) -> None:
        assert self._holder == threading.get_ident(), "only the thread that holds the lock releases it"
        self._num_taken -= 1
        if not self._num_taken:
            self._holder = 0
            self._put_token()

    def _take_token(self, timeout: float | None) -> bool:
        ends = None if timeout is None else time.monotonic() + timeout
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        while poll.poll(None if ends is None else max(0.0, ends - time.monotonic()) * 1000):
            try:
                return os.read(self._reader.fileno(), 1) != b""
            except BlockingIOError:
                continue
        return False

    def _put_token(self) -> None:
        os.write(self._writer.fileno(), b"1")

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class PipeLockContext(SpawnContext):
    """A spawn context whose locks are pipes."""

    def RLock(self) -> synchronize.RLock:
        return cast(synchronize.RLock, cast(Any, PipeLock(self.Pipe(duplex=False))))
