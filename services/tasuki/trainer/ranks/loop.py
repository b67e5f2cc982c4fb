"""Main loop of a trainer rank: starts, answers commands, and exits with the front or the launcher."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tasuki.rpc.failpoints import Failpoints
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.rpc.rank_server import Handlers, RankServer, answer_command, rank_error
from tasuki.trainer.ranks.front import ranks_path
from tasuki.v1.ranks_pb2 import RankReady, TrainerRankCommand, TrainerRankResult

_log = logging.getLogger("tasuki.trainer")


def run_rank(
    start: Callable[[], tuple[RankReady, Handlers]],
    *,
    rank: int,
    socket_dir: Path,
    launcher_fd: int,
    heartbeat: Heartbeat,
    failpoints: Failpoints,
) -> bool:
    """Starts the rank, then answers the front until it stops or is gone. Returns False if the start failed, as reported to the front.

    launcher_fd: pidfd of the launcher, whose end ends the rank. heartbeat: shows that a command is running.
    """

    def answer(payload: bytes) -> TrainerRankResult | None:
        command = TrainerRankCommand.FromString(payload)
        if command.HasField("stop"):
            return None
        with heartbeat.working():
            result = TrainerRankResult(call=command.call, rank=rank)
            return answer_command(command, result, handlers=handlers, failpoints=failpoints)

    with closing(RankServer(f"ipc://{ranks_path(socket_dir)}", rank=rank)) as server:
        front_gone = server.front_gone()
        try:
            ready, handlers = start()
        except Exception as error:  # noqa: BLE001 - a boundary: whatever it is, the front has to hear of it
            server.send(TrainerRankResult(rank=rank, error=rank_error(error)))
            return False
        ready.pid = os.getpid()
        server.send(TrainerRankResult(rank=rank, ready=ready))
        ended = server.serve(answer, until=[front_gone, launcher_fd])
        if ended is not None:
            _log.warning("event=rank_leaves rank=%d cause=%s", rank, "front_gone" if ended is front_gone else "launcher_gone")
        return True
