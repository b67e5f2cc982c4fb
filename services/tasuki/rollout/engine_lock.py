"""Lock on a rank's model, shared by its scheduler and the front's commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class EngineLock:
    """Held by the scheduler, except while it waits for requests; then available to a command from the front.

    Fair: a waiting thread gets it next, although a busy scheduler releases it for only microseconds.
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
        """Releases the lock for the block; called by its holder."""
        self.release()
        try:
            yield
        finally:
            self.acquire()
