"""An engine rank's connection to the front: sends the scheduler's results and receives commands that bypass batches."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from tasuki.rpc.ranks import RankServer
from tasuki.v1.ranks_pb2 import EngineRankCommand, EngineRankResult

_log = logging.getLogger("tasuki.rollout")
# If nobody takes a result, the front is gone and this process will end too.
_LINGER_MS = 5000


class RankLine:
    """Owns the rank's sockets and the thread that reads commands, until `close`. There are two sockets, one per thread.

    run: executes a command from the front, in this thread.
    """

    def __init__(self, address: str, *, rank: int, run: Callable[[EngineRankCommand], EngineRankResult]) -> None:
        self.address = address
        self._results = RankServer(address, linger_ms=_LINGER_MS)
        self._commands = RankServer(address, rank=rank, linger_ms=_LINGER_MS)
        self._commands.send(EngineRankResult(rank=rank))  # lets the front send
        self._closed = os.eventfd(0)
        self._thread = threading.Thread(target=self._answer, args=(run,), name="front-line", daemon=True)
        self._thread.start()

    def send(self, result: EngineRankResult) -> None:
        """Must be called from the thread that created this object."""
        self._results.send(result)

    def _answer(self, run: Callable[[EngineRankCommand], EngineRankResult]) -> None:
        """Ends the process where it fails, so that the front sees the rank's end instead of waiting for an answer."""
        try:
            for command in self._commands.commands(EngineRankCommand, until=[self._closed]):
                self._commands.send(run(command))
        except BaseException:  # noqa: BLE001  whatever it is, nobody else reads commands
            _log.exception("event=rank_line_failed")
            os._exit(1)

    def close(self) -> None:
        os.eventfd_write(self._closed, 1)
        self._thread.join()
        self._commands.close()
        self._results.close()
        os.close(self._closed)
