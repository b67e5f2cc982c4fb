"""The front's side of a sync: makes every engine rank receive, and compares the result with what was published."""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tasuki.v1 import ranks_pb2, types_pb2, weights_pb2
from tasuki.v1.rollout_pb2 import ReceiveWeightsResponse
from tasuki.weights.imported_weights import Comparison, HeldSlice, ImportedWeights, import_weights
from tasuki.weights.plan import Slice
from tasuki.wire.errors import BadHandle

if TYPE_CHECKING:
    from tasuki.rollout.rollout import RankCalls

_IMPORT_TIMEOUT_S = 10.0


class WeightSync:
    """Moves published weights into the engine; `close` releases the trainer's memory.

    socket_dir: the node's private folder; handles that point elsewhere are refused. num_replicas: of the engine; each must hold
    everything.
    """

    def __init__(self, calls: "RankCalls", *, socket_dir: Path, num_replicas: int = 1) -> None:
        self._calls = calls
        self._num_replicas = num_replicas
        self._socket_dir = socket_dir
        self._imported: ImportedWeights | None = None
        self._layouts: dict[bytes, Sequence[HeldSlice]] = {}
        """Layouts of the ranks by digest, from the last sync; ranks then send checksums only."""
        self._comparisons: tuple[Sequence[bytes], ImportedWeights, Sequence[Comparison]] | None = None
        """Expected layout of each replica, for these rank layouts."""

    async def prepare(self, weights: weights_pb2.PublishedWeights) -> ImportedWeights:
        """Maps and checks what was published; does not touch the engine. Raises BadHandle or VersionOrder after releasing memory."""
        for index, handle in enumerate(weights.handles):
            if os.path.dirname(handle.socket_path) != str(self._socket_dir):
                raise BadHandle(f"weights.handles[{index}].socket_path is not in {self._socket_dir}", socket=handle.socket_path)
        if self._imported is None or not self._imported.is_of(weights):
            self.close()
            self._imported = await asyncio.to_thread(import_weights, weights, timeout_s=_IMPORT_TIMEOUT_S)
        hold = partial(self._imported.hold, weights, timeout_s=_IMPORT_TIMEOUT_S)
        if self._imported.is_current(weights):
            hold()
        else:
            await asyncio.to_thread(hold)
        return self._imported

    async def run(
        self, weights: weights_pb2.PublishedWeights, imported: ImportedWeights, *, timeout_s: float
    ) -> ReceiveWeightsResponse:
        """Copies on every rank and checks the result. After any error the engine's weights are unknown.

        Timings are those of the slowest rank; for the front "ranks", from the command to the last rank's answer, and "compare".

        Raises WeightsCorrupt naming tensors (and, if the front maps the publication, on a CPU, the rank), DeadlineExceeded, or a rank's
        error.
        """
        command = ranks_pb2.ReceiveCommand(
            weights=weights,
            import_timeout_ms=int(_IMPORT_TIMEOUT_S * 1000),
            known_layouts=list(self._layouts),
        )
        try:
            started = time.perf_counter()
            results = await self._calls.receive(command, timeout_s=timeout_s)
            answered = time.perf_counter()
            await self._compare(results, imported)
            # If the publisher started the next version meanwhile, the comparison is invalid.
            imported.check_version(weights.policy_version)
            sums = weights_pb2.WeightSums(
                policy_version=weights.policy_version,
                layout_digest=imported.layout_digest(),
                checksums=imported.checksums_by_name(),
            )
            compared = time.perf_counter()
        finally:
            imported.release()
        return _report(results, sums, {"ranks": answered - started, "compare": compared - answered})

    async def _compare(self, results: Sequence[ranks_pb2.ReceiveResult], imported: ImportedWeights) -> None:
        digests = [result.layout_digest for result in results]
        self._layouts = {
            result.layout_digest: _held(result) if result.checksums else self._layouts[result.layout_digest]
            for result in results
        }
        tp_size = len(results) // self._num_replicas
        firsts = range(0, len(results), tp_size)
        if self._comparisons is None or self._comparisons[:2] != (digests, imported):
            held = [
                [(rank, *one) for rank in range(first, first + tp_size) for one in self._layouts[digests[rank]]]
                for first in firsts
            ]
            made = await asyncio.to_thread(lambda: [Comparison(one, imported) for one in held])
            self._comparisons = digests, imported, made
        for first, comparison in zip(firsts, self._comparisons[2], strict=True):
            sums = np.concatenate([_sums(result) for result in results[first : first + tp_size]])
            if not comparison.agrees(sums):
                await asyncio.to_thread(comparison.refuse, sums)

    def close(self) -> None:
        if self._imported is not None:
            self._imported.close()
            self._imported = self._comparisons = None


def _held(result: ranks_pb2.ReceiveResult) -> Sequence[HeldSlice]:
    return [(piece.name, Slice(piece.offset, tuple(piece.shape), tuple(piece.strides))) for piece in result.checksums]


def _sums(result: ranks_pb2.ReceiveResult) -> np.ndarray:
    if result.checksums:
        return np.array([piece.checksum for piece in result.checksums], dtype=np.uint64)
    return np.frombuffer(result.sums, dtype="<u8").astype(np.uint64)


def _report(
    results: Sequence[ranks_pb2.ReceiveResult], sums: weights_pb2.WeightSums, front_timings: Mapping[str, float]
) -> ReceiveWeightsResponse:
    slowest: defaultdict[str, float] = defaultdict(float)
    for result in results:
        for timing in result.timings:
            slowest[timing.name] = max(slowest[timing.name], timing.seconds)
    return ReceiveWeightsResponse(
        policy_version=sums.policy_version,
        copied_bytes=sum(result.copied_bytes for result in results),
        fallback_names=dict.fromkeys(name for result in results for name in result.fallback_names),
        timings=[types_pb2.Timing(name=name, seconds=seconds) for name, seconds in {**slowest, **front_timings}.items()],
        sums=sums,
    )
