"""Front of the trainer's ranks."""

import os
from pathlib import Path

from tasuki.rpc.ranks import RankFront
from tasuki.v1.ranks_pb2 import RankReady, RankStop, TrainerRankCommand, TrainerRankResult
from tasuki.wire.errors import PeerUnavailable

# In addition to the collectives' timeout, for results to arrive.
_ANSWER_MARGIN_S = 10.0


def ranks_path(socket_dir: Path, launch_id: str) -> Path:
    """Socket on which the front listens. A trainer that was killed may still be closing its own."""
    return socket_dir / f"trainer-{launch_id}.sock"


class TrainerRanks(RankFront[TrainerRankCommand, TrainerRankResult]):
    """Calls the trainer ranks, which connect to it."""

    # Another node was lost during a sum of gradients.
    breaking = frozenset({PeerUnavailable.reason})

    def __init__(self, *, socket_dir: Path, launch_id: str, num_ranks: int, collective_timeout_s: float) -> None:
        path = ranks_path(socket_dir, launch_id)
        for left in socket_dir.glob(ranks_path(socket_dir, "*").name):
            left.unlink(missing_ok=True)
        super().__init__(path, TrainerRankResult, service="trainer", num_ranks=num_ranks)
        self.straggler_timeout_s = collective_timeout_s + _ANSWER_MARGIN_S

    async def ready(self) -> RankReady:
        """Waits until every rank has loaded the model. Returns rank 0's report, with the sum of all rates to other nodes.

        Raises the error of a rank that failed.
        """
        results = await self._wait_for_results()
        await self._raise_errors(results)
        for rank, result in enumerate(results):
            if result.ready.pid != os.getpid():
                self.watch(rank, pid=result.ready.pid)
        ready = results[0].ready
        if ready.HasField("nodes_rate"):
            ready.nodes_rate = sum(result.ready.nodes_rate for result in results)
        ready.nodes_transport = ", ".join(sorted({result.ready.nodes_transport for result in results} - {""}))
        return ready

    async def stop(self) -> None:
        """Tells the ranks to exit, and closes."""
        await self._send([TrainerRankCommand(stop=RankStop())] * self.num_ranks)
        self.close()
