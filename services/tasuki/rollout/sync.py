"""The front's end of a sync: has every engine rank receive, and compares what they hold with what was published."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasuki.rollout.rank_calls import RankCalls
from tasuki.transport.imported_weights import ImportedWeights, import_weights
from tasuki.transport.plan import Slice
from tasuki.transport.verify import ReceivedPiece, check_received
from tasuki.v1 import ranks_pb2, weights_pb2
from tasuki.wire.errors import BadHandle

_IMPORT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A sync that every rank made and that was verified. timings: seconds of the slowest rank, by part."""

    policy_version: int
    copied_bytes: int
    fallback_names: tuple[str, ...]
    timings: dict[str, float]


class WeightSync:
    """Moves published weights into the engine; `close` lets go of the trainer's memory.

    socket_dir: the node's private folder; handles that point elsewhere are refused.
    """

    def __init__(self, calls: RankCalls, *, socket_dir: Path) -> None:
        self._calls = calls
        self._socket_dir = socket_dir
        self._imported: ImportedWeights | None = None

    async def prepare(self, weights: weights_pb2.PublishedWeights) -> ImportedWeights:
        """Maps and checks what was published; touches no engine. Raises BadHandle or VersionOrder."""
        for index, handle in enumerate(weights.handles):
            if Path(handle.socket_path).parent != self._socket_dir:
                raise BadHandle(f"weights.handles[{index}].socket_path is not in {self._socket_dir}", socket=handle.socket_path)
        if self._imported is None or not self._imported.is_of(weights):
            imported = await asyncio.to_thread(import_weights, weights, timeout_s=_IMPORT_TIMEOUT_S)
            if self._imported is not None:
                self._imported.close()
            self._imported = imported
        await asyncio.to_thread(self._imported.renew, weights, timeout_s=_IMPORT_TIMEOUT_S)
        self._imported.check_version(weights.policy_version)
        return self._imported

    async def run(self, weights: weights_pb2.PublishedWeights, imported: ImportedWeights, *, timeout_s: float) -> SyncReport:
        """Has every rank copy, and checks the result. After any error the engine's weights are unknown.

        Raises WeightsCorrupt naming tensors and rank, DeadlineExceeded, or what a rank reported.
        """
        try:
            results = await self._calls.receive(weights, import_timeout_s=_IMPORT_TIMEOUT_S, timeout_s=timeout_s)
            await asyncio.to_thread(check_received, list(_pieces(results)), imported)
            # A publisher that began the next version meanwhile would have changed what was compared.
            imported.check_version(weights.policy_version)
        finally:
            imported.let_go()
        return _report(weights.policy_version, results)

    def close(self) -> None:
        if self._imported is not None:
            self._imported.close()


def _pieces(results: Sequence[ranks_pb2.ReceiveResult]) -> Iterable[ReceivedPiece]:
    for tp_rank, result in enumerate(results):
        for piece in result.checksums:
            source = Slice(piece.offset, tuple(piece.shape), tuple(piece.strides))
            yield ReceivedPiece(tp_rank, piece.name, source, piece.checksum)


def _report(policy_version: int, results: Sequence[ranks_pb2.ReceiveResult]) -> SyncReport:
    slowest: defaultdict[str, float] = defaultdict(float)
    for result in results:
        for timing in result.timings:
            slowest[timing.name] = max(slowest[timing.name], timing.seconds)
    return SyncReport(
        policy_version=policy_version,
        copied_bytes=sum(result.copied_bytes for result in results),
        fallback_names=tuple(dict.fromkeys(name for result in results for name in result.fallback_names)),
        timings=dict(slowest),
    )
