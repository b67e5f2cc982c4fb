"""A service's metrics: those of gRPC calls have the names of go-grpc-middleware, so that public dashboards work."""

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tasuki.rpc.methods import METHODS, Method
from tasuki.rpc.metric_names import GPU_SECONDS, SPANS
from tasuki.v1.metrics_pb2 import GetMetricsRequest, GetMetricsResponse
from tasuki.v1.metrics_pb2_grpc import MetricsServiceServicer
from tasuki.wire.tracing import Tracer

_LABELS = ("grpc_type", "grpc_service", "grpc_method")
# A stage may take minutes, a read less than a millisecond.
_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300)


class CallMetrics:
    """grpc_server_started_total, grpc_server_handled_total{grpc_code} and grpc_server_handling_seconds of one server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._started = Counter("grpc_server_started", "RPCs started on the server.", _LABELS, registry=registry)
        self._handled = Counter(
            "grpc_server_handled", "RPCs completed on the server, by status code.", (*_LABELS, "grpc_code"), registry=registry
        )
        self._handling_s = Histogram(
            "grpc_server_handling_seconds",
            "Seconds until the server completed an RPC.",
            _LABELS,
            buckets=_BUCKETS_S,
            registry=registry,
        )

    def preset(self, service: str) -> None:
        """Shows the methods of a service at zero before their first call."""
        for method in METHODS.values():
            if method.service == service:
                self._started.labels(*_labels(method))

    def started(self, method: Method) -> None:
        self._started.labels(*_labels(method)).inc()

    def handled(self, method: Method, *, code: grpc.StatusCode, seconds: float) -> None:
        camel_case = "OK" if code is grpc.StatusCode.OK else "".join(word.capitalize() for word in code.name.split("_"))
        self._handled.labels(*_labels(method), camel_case).inc()
        self._handling_s.labels(*_labels(method)).observe(seconds)


class SpanCounts(Collector):
    """Counts of the spans of `tracer`, by outcome."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def describe(self) -> Iterable[CounterMetricFamily]:
        return [SPANS.counters()]

    def collect(self) -> Iterable[CounterMetricFamily]:
        family = SPANS.counters()
        for outcome, number in sorted(self._tracer.counts().items()):
            family.add_metric([outcome], number)
        yield family


class MetricsServicer(MetricsServiceServicer):
    """Serves a registry's metrics. refresh: updates polled values before each answer; must not raise."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.refresh: Callable[[], Awaitable[None]] | None = None

    async def GetMetrics(self, request: GetMetricsRequest, context: Any) -> GetMetricsResponse:
        if self.refresh is not None:
            await self.refresh()
        return GetMetricsResponse(text=generate_latest(self._registry))


def joined(families: Iterable[Metric]) -> list[Metric]:
    """Merges metric families by name, with the samples of all."""
    by_name: dict[str, Metric] = {}
    for family in families:
        if family.samples:
            whole = by_name.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples.extend(family.samples)
    return list(by_name.values())


def of_service(families: Iterable[Metric], service: str) -> list[Metric]:
    """The families with the label `service` at samples that lack it, without the times at which counters were made."""
    found: list[Metric] = []
    for family in families:
        named = Metric(family.name, family.documentation, family.type)
        shown = (each for each in family.samples if not each.name.endswith("_created"))
        named.samples = [each._replace(labels={"service": service} | each.labels) for each in shown]
        found.append(named)
    return found


def _labels(method: Method) -> tuple[str, str, str]:
    return method.kind, method.service, method.method


class GpuSeconds(Collector):
    """For one event loop; calls that overlap under one use count once."""

    def __init__(self, registry: CollectorRegistry, *, num_gpus: int) -> None:
        self._num_gpus = num_gpus
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._num_running: defaultdict[str, int] = defaultdict(int)
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
