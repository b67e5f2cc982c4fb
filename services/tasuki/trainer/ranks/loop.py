"""A trainer rank's life: it starts, answers commands, and leaves when the front or the launcher does."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from tasuki.rpc.failpoints import Failpoints
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.rpc.rank_server import Handlers, RankServer, answer_command, rank_error
from tasuki.trainer.ranks.front import ranks_path
from tasuki.v1.ranks_pb2 import RankReady, TrainerRankCommand, TrainerRankResult

_log = logging.getLogger("tasuki.trainer")
_LINGER_MS = 1000


class RankLoop:
    """Serves the front until it stops, or is gone."""

    def __init__(self, *, rank: int, socket_dir: Path, launcher_fd: int, heartbeat: Heartbeat, failpoints: Failpoints) -> None:
        """launcher_fd: pidfd of the process that launched the ranks; its end ends the loop. heartbeat: shows when a command runs."""
        self._rank, self._launcher_fd = rank, launcher_fd
        self._heartbeat, self._failpoints = heartbeat, failpoints
        self._server = RankServer(f"ipc://{ranks_path(socket_dir)}", rank=rank, linger_ms=_LINGER_MS)

    def run(self, start: Callable[[], tuple[RankReady, Handlers]]) -> bool:
        """Starts the rank's work, then answers commands. Returns False when the start failed; the front knows why."""
        front_gone = self._server.front_gone()
        try:
            try:
                ready, handlers = start()
            except Exception as error:  # noqa: BLE001 - a boundary: whatever it is, the front has to hear of it
                self._server.send(TrainerRankResult(rank=self._rank, error=rank_error(error)))
                return False
            ready.pid = os.getpid()
            self._server.send(TrainerRankResult(rank=self._rank, ready=ready))
            ended = self._server.serve(lambda payload: self._answer(payload, handlers), until=[front_gone, self._launcher_fd])
            if ended is not None:
                cause = "front_gone" if ended is front_gone else "launcher_gone"
                _log.warning("event=rank_leaves rank=%d cause=%s", self._rank, cause)
            return True
        finally:
            self._server.close()

    def _answer(self, payload: bytes, handlers: Handlers) -> TrainerRankResult | None:
        """None for the command to stop."""
        command = TrainerRankCommand.FromString(payload)
        if command.HasField("stop"):
            return None
        result = TrainerRankResult(call=command.call, rank=self._rank)
        with self._heartbeat.working():
            return answer_command(command, result, handlers=handlers, failpoints=self._failpoints)
