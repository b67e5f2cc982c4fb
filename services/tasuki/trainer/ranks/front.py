"""The trainer's front to its ranks."""

from __future__ import annotations

import os
from pathlib import Path

from tasuki.rpc.ranks import RankFront
from tasuki.v1.ranks_pb2 import RankReady, RankStop, TrainerRankCommand, TrainerRankResult
from tasuki.wire.errors import PeerUnavailable

# Beyond the collectives' own time-out, for results to arrive.
_ANSWER_MARGIN_S = 10.0


def ranks_path(socket_dir: Path) -> Path:
    """Of the socket on which the front listens."""
    return socket_dir / "trainer-ranks.sock"


class TrainerRanks(RankFront[TrainerRankCommand, TrainerRankResult]):
    """Calls the trainer ranks, which connect by themselves."""

    # Another node was lost in the middle of a sum of gradients.
    breaking = frozenset({PeerUnavailable.reason})

    def __init__(self, *, socket_dir: Path, num_ranks: int, collective_timeout_s: float) -> None:
        super().__init__(ranks_path(socket_dir), TrainerRankResult, service="trainer", num_ranks=num_ranks)
        self.straggler_timeout_s = collective_timeout_s + _ANSWER_MARGIN_S

    async def ready(self) -> RankReady:
        """Returns when every rank has loaded the model: what rank 0 says, with the sum of all rates to other nodes.

        Raises the error of the rank that could not.
        """
        results = await self._wait_for_results()
        await self._raise_errors(results)
        for rank, result in enumerate(results):
            if result.ready.pid != os.getpid():
                self.watch(rank, pid=result.ready.pid)
        ready = results[0].ready
        if ready.HasField("nodes_rate"):
            ready.nodes_rate = sum(result.ready.nodes_rate for result in results)
        return ready

    async def stop(self) -> None:
        """Has the ranks leave, and closes."""
        await self._deliver([TrainerRankCommand(stop=RankStop())] * self.num_ranks)
        self.close()
