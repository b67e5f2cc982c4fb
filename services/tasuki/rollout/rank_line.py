"""An engine rank's line to the front: the scheduler's results go out there, and commands that wait for no batch come in there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from tasuki.rpc.ranks import RankServer
from tasuki.v1.ranks_pb2 import EngineRankResult

# The front has gone when nobody takes a result; then this process is about to go, too.
_LINGER_MS = 5000


class RankLine:
    """Owns the rank's sockets and the thread that reads commands, until `close`. A socket belongs to one thread, so there are two.

    run: carries out a command from the front, in the line's thread.
    """

    def __init__(self, address: str, *, rank: int, run: Callable[[bytes], EngineRankResult]) -> None:
        self.address = address
        self._results = RankServer(address, linger_ms=_LINGER_MS)
        self._commands = RankServer(address, rank=rank, linger_ms=_LINGER_MS)
        self._commands.send(EngineRankResult(rank=rank))  # from here on the front can send
        self._closed = os.eventfd(0)
        self._thread = threading.Thread(
            target=lambda: self._commands.serve(run, until=[self._closed]), name="front-line", daemon=True
        )
        self._thread.start()

    def send(self, result: EngineRankResult) -> None:
        """From the thread that made this line."""
        self._results.send(result)

    def close(self) -> None:
        os.eventfd_write(self._closed, 1)
        self._thread.join()
        self._commands.close()
        self._results.close()
        os.close(self._closed)
