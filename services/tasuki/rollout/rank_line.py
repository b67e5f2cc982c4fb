"""An engine rank's line to the front: the scheduler's results go out there, and commands that wait for no batch come in there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from google.protobuf.message import Message

from tasuki.rpc.rank_server import RankServer

# The front has gone when nobody takes a result; then this process is about to go, too.
_LINGER_MS = 5000


class RankLine:
    """Owns the rank's socket and the thread that reads it, until `close`.

    run: carries out a command from the front, in that thread.
    """

    def __init__(self, address: str, *, rank: int, run: Callable[[bytes], Message]) -> None:
        self.address = address
        self._run = run
        self._server = RankServer(address, rank=rank, linger_ms=_LINGER_MS)
        # A socket belongs to one thread: what the scheduler's has to say goes through a queue.
        self._results: SimpleQueue[Message | None] = SimpleQueue()
        self._has_results = os.eventfd(0)
        self._thread = threading.Thread(target=self._serve, name="front-line", daemon=True)
        self._thread.start()

    def send(self, result: Message | None) -> None:
        """From any thread. None ends the line."""
        self._results.put(result)
        os.eventfd_write(self._has_results, 1)

    def close(self) -> None:
        self.send(None)
        self._thread.join()
        os.close(self._has_results)

    def _serve(self) -> None:
        try:
            while True:
                self._server.serve(self._run, until=[self._has_results])
                for _ in range(os.eventfd_read(self._has_results)):
                    if (result := self._results.get()) is None:
                        return
                    self._server.send(result)
        finally:
            self._server.close()
