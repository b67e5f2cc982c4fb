"""Who watches a node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from tasuki.coordinator.operation import StateUpdate

_BACKLOG = 1024


class Watchers:
    """Each has its own queue."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[StateUpdate | None]] = set()

    @contextmanager
    def watching(self) -> Iterator[asyncio.Queue[StateUpdate | None]]:
        """A queue of what happens from now on, and None at the end. One that is not read loses its oldest events."""
        queue: asyncio.Queue[StateUpdate | None] = asyncio.Queue(_BACKLOG)
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    def tell(self, update: StateUpdate | None) -> None:
        """None lets every watcher go, so that a server can stop."""
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(update)
