"""The front's end of a sync: asks every engine rank, collects their answers, and compares them with what was published."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio

from tasuki.transport.imported_weights import ImportedWeights, import_weights
from tasuki.transport.plan import Slice
from tasuki.transport.verify import ReceivedPiece, check_received
from tasuki.v1 import ranks_pb2, weights_pb2
from tasuki.wire.errors import BadHandle, DeadlineExceeded, InternalError, TasukiError, from_reason

if TYPE_CHECKING:
    from tasuki.rollout.engine import RolloutEngine

_IMPORT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A sync that every rank made and that was verified. timings: seconds of the slowest rank, by part."""

    policy_version: int
    copied_bytes: int
    fallback_names: tuple[str, ...]
    timings: dict[str, float]


class WeightSync:
    """Moves published weights into the engine. Owns the socket on which ranks answer; `close` removes it.

    socket_dir: the node's private folder; handles that point elsewhere are refused.
    """

    def __init__(self, engine: RolloutEngine, *, socket_dir: Path) -> None:
        self._engine = engine
        self._socket_dir = socket_dir
        self._path = socket_dir / "rollout-ranks.sock"
        self._path.unlink(missing_ok=True)
        self._context = zmq.asyncio.Context()
        self._answers = self._context.socket(zmq.PULL)
        self._answers.bind(f"ipc://{self._path}")
        self._path.chmod(0o600)
        self._imported: ImportedWeights | None = None
        self._call = 0

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
        self._imported.check_version(weights.policy_version)
        return self._imported

    async def run(self, weights: weights_pb2.PublishedWeights, imported: ImportedWeights, *, timeout_s: float) -> SyncReport:
        """Has every rank copy, and checks the result. After any error the engine's weights are unknown.

        Raises WeightsCorrupt naming tensors and rank, DeadlineExceeded, or what a rank reported.
        """
        self._call += 1
        command = ranks_pb2.EngineRankCommand(
            call=self._call,
            reply_address=f"ipc://{self._path}",
            receive=ranks_pb2.ReceiveCommand(weights=weights, import_timeout_ms=int(_IMPORT_TIMEOUT_S * 1000)),
        )
        try:
            async with asyncio.timeout(timeout_s):
                _, results = await asyncio.gather(
                    self._engine.update_weights(command.SerializeToString()), self._collect(len(self._engine.reports))
                )
        except TimeoutError as error:
            raise DeadlineExceeded(f"not every engine rank answered within {timeout_s:g} s", stage="sync") from error
        _raise_first_error(results)
        await asyncio.to_thread(check_received, list(_pieces(results)), imported)
        # A publisher that began the next version meanwhile would have changed what was compared.
        imported.check_version(weights.policy_version)
        return _report(weights.policy_version, results)

    def close(self) -> None:
        self._answers.close(linger=0)
        self._context.term()
        self._path.unlink(missing_ok=True)
        if self._imported is not None:
            self._imported.close()

    async def _collect(self, num_ranks: int) -> list[ranks_pb2.EngineRankResult]:
        results: dict[int, ranks_pb2.EngineRankResult] = {}
        while len(results) < num_ranks:
            result = ranks_pb2.EngineRankResult.FromString(await self._answers.recv())
            # An answer to a call that timed out may still arrive.
            if result.call == self._call:
                results[result.tp_rank] = result
        return [results[tp_rank] for tp_rank in sorted(results)]


def _raise_first_error(results: Sequence[ranks_pb2.EngineRankResult]) -> None:
    for result in results:
        if result.HasField("error"):
            raise _error_of(result)


def _error_of(result: ranks_pb2.EngineRankResult) -> TasukiError:
    message = f"engine rank {result.tp_rank}: {result.error.message}"
    if not result.error.reason:
        return InternalError(message)
    return from_reason(result.error.reason, message, {**result.error.metadata, "rank": str(result.tp_rank)})


def _pieces(results: Iterable[ranks_pb2.EngineRankResult]) -> Iterable[ReceivedPiece]:
    for result in results:
        for piece in result.receive.checksums:
            source = Slice(piece.offset, tuple(piece.shape), tuple(piece.strides))
            yield ReceivedPiece(result.tp_rank, piece.name, source, piece.checksum)


def _report(policy_version: int, results: Sequence[ranks_pb2.EngineRankResult]) -> SyncReport:
    slowest: defaultdict[str, float] = defaultdict(float)
    for result in results:
        for timing in result.receive.timings:
            slowest[timing.name] = max(slowest[timing.name], timing.seconds)
    return SyncReport(
        policy_version=policy_version,
        copied_bytes=sum(result.receive.copied_bytes for result in results),
        fallback_names=tuple(dict.fromkeys(name for result in results for name in result.receive.fallback_names)),
        timings=dict(slowest),
    )
