"""The lock on a rank's model, which its scheduler and the front's commands take in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class EngineLock:
    """Held by the scheduler, except while it waits for requests; then by a command from the front.

    Fair: a waiting thread comes next, although a busy scheduler releases the lock for microseconds at a time.
    """

    def __init__(self) -> None:
        self._held, self._next = Lock(), Lock()

    def acquire(self) -> None:
        with self._next:
            self._held.acquire()

    def release(self) -> None:
        self._held.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def released(self) -> Iterator[None]:
        """For the holder; acquires the lock again at the end."""
        self.release()
        try:
            yield
        finally:
            self.acquire()
