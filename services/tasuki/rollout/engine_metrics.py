"""SGLang's own metrics: its ranks write them to files, which the front reads and adds to its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, values
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from tasuki.rpc.metrics import joined

_PREFIX = "sglang:"


def keep_metrics_in_memory() -> None:
    """Keeps the front from writing metrics to the ranks' files, where ours would be read a second time.

    Call it before any metric is created.
    """
    values.ValueClass = values.MutexValue


class EngineMetrics(Collector):
    """Metrics of SGLang's ranks, from files, and of its part in this process."""

    def __init__(self, registry: CollectorRegistry, folder: Path) -> None:
        self._folder = folder
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: SGLang's names depend on its settings."""
        return ()

    def collect(self) -> Iterable[Metric]:
        # A file is empty for a moment when a rank has just created it.
        files = [str(file) for file in self._folder.glob("*.db") if file.stat().st_size]
        of_front = (family for family in REGISTRY.collect() if family.name.startswith(_PREFIX))
        return joined([*MultiProcessCollector.merge(files), *of_front])
