"""Whose turn it is to touch a rank's model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class Turn:
    """The scheduler's from its start on, but while it waits for requests; then a command's that came straight from the front.

    Whoever waits comes next: a scheduler that is busy lets go for microseconds at a time.
    """

    def __init__(self) -> None:
        self._held, self._next = Lock(), Lock()

    def take(self) -> None:
        with self._next:
            self._held.acquire()

    def let_go(self) -> None:
        self._held.release()

    @contextmanager
    def taken(self) -> Iterator[None]:
        self.take()
        try:
            yield
        finally:
            self.let_go()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """By who has it; takes it back at the end."""
        self.let_go()
        try:
            yield
        finally:
            self.take()
