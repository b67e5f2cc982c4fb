"""Counts a service's GPU seconds by use, while the work runs and not only at its end."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from tasuki.rpc.metric_names import GPU_SECONDS


class GpuSeconds(Collector):
    """For one event loop; calls that overlap under one use count once."""

    def __init__(self, registry: CollectorRegistry, *, num_gpus: int) -> None:
        self._num_gpus = num_gpus
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._num_running: Counter[str] = Counter()
        self._since: dict[str, float] = {}
        registry.register(self)

    @contextmanager
    def using(self, use: str) -> Iterator[None]:
        if not self._num_running[use]:
            self._since[use] = time.monotonic()
        self._num_running[use] += 1
        try:
            yield
        finally:
            self._num_running[use] -= 1
            if not self._num_running[use]:
                self._seconds[use] += time.monotonic() - self._since.pop(use)

    def describe(self) -> Iterable[CounterMetricFamily]:
        return [GPU_SECONDS.counters()]

    def collect(self) -> Iterable[CounterMetricFamily]:
        family, now = GPU_SECONDS.counters(), time.monotonic()
        for use in sorted(self._seconds.keys() | self._since.keys()):
            running = now - self._since[use] if use in self._since else 0.0
            family.add_metric([use], self._num_gpus * (self._seconds[use] + running))
        yield family
