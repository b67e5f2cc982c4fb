"""Rollout's Prometheus metrics: samples and tokens as they end, requests and KV cache when scraped."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, values
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from tasuki.rollout.rollout import Rollout
from tasuki.rpc.metrics import (
    KV_CAPACITY,
    KV_TOKENS,
    POLICY_VERSION,
    QUEUED_REQUESTS,
    ROLLOUT_SAMPLES,
    ROLLOUT_TOKENS,
    RUNNING_REQUESTS,
    GpuSeconds,
    joined,
)
from tasuki.v1.ranks_pb2 import LoadResult
from tasuki.v1.types_pb2 import FinishReason, Sample
from tasuki.wire.errors import TasukiError

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

    def collect(self) -> Iterable[Metric]:
        # A file is empty for a moment when a rank has just created it.
        files = [str(file) for file in self._folder.glob("*.db") if file.stat().st_size]
        of_front = (family for family in REGISTRY.collect() if family.name.startswith(_PREFIX))
        return joined([*MultiProcessCollector.merge(files), *of_front])


_LOAD_TIMEOUT_S = 1.0


class GenerationMetrics:
    """Metrics over all samples. num_gpus: GPUs of the engine's ranks."""

    def __init__(self, registry: CollectorRegistry, *, num_gpus: int) -> None:
        self._samples, self._tokens = ROLLOUT_SAMPLES.counter(registry), ROLLOUT_TOKENS.counter(registry)
        self._gpu_seconds = GpuSeconds(registry, num_gpus=num_gpus)

    @contextmanager
    def generating(self) -> Iterator[None]:
        with self._gpu_seconds.using("generate"):
            yield

    def ended(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._samples.labels(FinishReason.Name(sample.finish_reason).removeprefix("FINISH_REASON_").lower()).inc()
        self._tokens.inc(sum(len(sample.token_ids) for sample in samples))


class EngineLoad(Collector):
    """Load reported by the schedulers at a scrape; empty while they are busy with something long."""

    def __init__(self, registry: CollectorRegistry, rollout: Rollout) -> None:
        self._rollout = rollout
        self._replicas: Sequence[LoadResult] | None = ()
        """None while the schedulers do not answer; empty while nothing is served."""
        registry.register(self)

    async def refresh(self) -> None:
        """Queries the schedulers while they serve, with one message between two batches."""
        self._replicas = ()
        if self._rollout.policy_version is not None:
            try:
                self._replicas = (await self._rollout.ranks.load(timeout_s=_LOAD_TIMEOUT_S))[:: self._rollout.engine.tp_size]
            except TasukiError:
                self._replicas = None

    def collect(self) -> Iterable[GaugeMetricFamily]:
        running, queued, kv_tokens, capacity, version = (
            name.gauges() for name in (RUNNING_REQUESTS, QUEUED_REQUESTS, KV_TOKENS, KV_CAPACITY, POLICY_VERSION)
        )
        engine = self._rollout.engine
        capacity.add_metric([], engine.num_kv_tokens)
        if self._replicas is not None:
            running.add_metric([], sum(replica.num_running for replica in self._replicas))
            queued.add_metric([], engine.num_waiting + sum(replica.num_queued for replica in self._replicas))
            kv_tokens.add_metric([], sum(replica.num_kv_tokens for replica in self._replicas))
        if (served := self._rollout.policy_version) is not None:
            version.add_metric([], served)
        return running, queued, kv_tokens, capacity, version
