"""One rank's published weights: created at the first publication, kept or released between them."""

import logging
import time
from collections.abc import Callable

from tasuki.trainer.memory import TrainerMemory
from tasuki.v1.ranks_pb2 import RankPublished
from tasuki.weights.export import ExportMemory, Replaced, WeightExport
from tasuki.wire.errors import OutOfGpuMemory

_log = logging.getLogger("tasuki.trainer")


class Publication:
    """Publishes, with the memory that `memory` keeps for it."""

    def __init__(
        self,
        memory: TrainerMemory,
        make: Callable[[ExportMemory], WeightExport],
        *,
        replaced: Callable[[], Replaced | None] = lambda: None,
    ) -> None:
        """replaced: content in the place of some shards, once `make` has been called."""
        self._memory, self._make, self._replaced = memory, make, replaced
        self._export: WeightExport | None = None

    def publish(self, policy_version: int) -> RankPublished:
        """Collective. Raises OutOfGpuMemory."""
        started = time.perf_counter()
        self._export = self._memory.export(self._make)
        mapped = time.perf_counter()
        num_bytes = self._export.publish(policy_version, replaced=self._replaced())
        seconds = mapped - started, time.perf_counter() - mapped
        _log.info("event=published policy_version=%d bytes=%d map_s=%.4f write_s=%.4f", policy_version, num_bytes, *seconds)
        return RankPublished(handle=self._export.handle(), published_bytes=num_bytes)

    def rehearse(self) -> None:
        """Publishes and withdraws, which loads kernels. Keeps the memory if it stays during OFFLOAD. Raises OutOfGpuMemory."""
        self._export = self._memory.export(self._make)
        self._export.publish(0, replaced=self._replaced())
        self._export.withdraw()
        self._memory.release_export()

    def try_rehearsal(self) -> None:
        """Same; logs if there is no room."""
        try:
            self.rehearse()
        except OutOfGpuMemory as error:
            _log.warning("event=not_warm reason=%s error=%s", error.reason, error.message)

    def withdraw(self) -> None:
        if self._export is not None:
            self._export.withdraw()

    def damage(self) -> None:
        """Injects a fault for tests of recovery."""
        assert self._export is not None
        self._export.damage()

    def close(self) -> None:
        """Nobody else receives the weights from now on."""
        if self._export is not None:
            self._export.close()
