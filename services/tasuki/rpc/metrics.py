"""A service's metrics: those of gRPC calls have the names of go-grpc-middleware, so that public dashboards work.

Ours have names, kinds, labels and meanings at the end. docs/reference/metrics.md and the dashboard in deploy/ have the same names.
The labels `service`, and of `grpc_server_*` those of go-grpc-middleware, are added where all services meet.
"""

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tasuki.rpc.methods import METHODS, Method
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

    def collect(self) -> Iterable[CounterMetricFamily]:
        family, now = GPU_SECONDS.counters(), time.monotonic()
        for use in sorted(self._seconds.keys() | self._since.keys()):
            running = now - self._since[use] if use in self._since else 0.0
            family.add_metric([use], self._num_gpus * (self._seconds[use] + running))
        yield family


@dataclass(frozen=True, slots=True)
class MetricName:
    name: str
    """Name in queries; a counter's ends in _total."""
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    text: str

    def counter(self, registry: CollectorRegistry) -> Counter:
        return Counter(self.name, self.text, self.labels, registry=registry)

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        return Gauge(self.name, self.text, self.labels, registry=registry)

    def histogram(self, registry: CollectorRegistry, *, buckets: Sequence[float]) -> Histogram:
        return Histogram(self.name, self.text, self.labels, registry=registry, buckets=buckets)

    def gauges(self) -> GaugeMetricFamily:
        """Empty, for a collector that knows the values when it is asked."""
        return GaugeMetricFamily(self.name, self.text, labels=self.labels)

    def counters(self) -> CounterMetricFamily:
        return CounterMetricFamily(self.name, self.text, labels=self.labels)


SERVICE_UP = MetricName("tasuki_service_up", "gauge", ("service",), "Whether the service answers.")
PHASE = MetricName(
    "tasuki_phase", "gauge", ("phase",), "1 for where the node is: TRAIN, ROLLOUT or CHANGEOVER. 0 for all while it is unknown."
)
STAGE_SECONDS = MetricName("tasuki_stage_seconds", "histogram", ("stage", "status"), "Seconds of a stage of a changeover.")
CHANGEOVERS = MetricName(
    "tasuki_changeovers_total", "counter", ("target", "status"), "Changeovers that ended, by the phase they led to."
)
POLICY_VERSION = MetricName(
    "tasuki_policy_version", "gauge", (), "Optimizer steps behind the weights that the service trains or serves."
)
MEMORY_MAPPED = MetricName(
    "tasuki_memory_mapped_bytes",
    "gauge",
    ("service", "tag", "device"),
    "Memory that the tag holds, over all ranks on the device.",
)
MEMORY_STAYS = MetricName(
    "tasuki_memory_stays", "gauge", ("service", "tag", "device"), "Ranks on whose device the tag stays during the other phase."
)
MEMORY_PLANNED = MetricName(
    "tasuki_memory_planned_bytes",
    "gauge",
    ("service", "tag", "device"),
    "Memory that `tasuki plan` predicts for the phase or stage that the node is at. Working memory has no service.",
)
DEVICE_FREE = MetricName("tasuki_device_free_bytes", "gauge", ("device",), "Free memory, as the driver or the host reports it.")
DEVICE_TOTAL = MetricName("tasuki_device_total_bytes", "gauge", ("device",), "Memory of the device.")
GPUS = MetricName("tasuki_gpus", "gauge", (), "GPUs that the node shares; on a CPU the ranks of the larger service.")
GPU_SECONDS = MetricName(
    "tasuki_gpu_seconds_total", "counter", ("use",), "GPU time by what it was held for; the rest was idle."
)
RUNNING_REQUESTS = MetricName("tasuki_rollout_running_requests", "gauge", (), "Samples that are being generated.")
QUEUED_REQUESTS = MetricName("tasuki_rollout_queued_requests", "gauge", (), "Samples that wait for room in the engine.")
KV_TOKENS = MetricName("tasuki_rollout_kv_tokens", "gauge", (), "Tokens of the KV cache that running samples hold.")
KV_CAPACITY = MetricName("tasuki_rollout_kv_capacity_tokens", "gauge", (), "Tokens that the KV cache has room for.")
ROLLOUT_TOKENS = MetricName("tasuki_rollout_tokens_total", "counter", (), "Tokens of completed samples.")
ROLLOUT_SAMPLES = MetricName(
    "tasuki_rollout_samples_total", "counter", ("finish_reason",), "Completed samples, by why they ended: stop, length or cut."
)
TRAINER_TOKENS = MetricName("tasuki_trainer_tokens_total", "counter", ("role",), "Tokens that losses counted.")
TRAINER_SAMPLES = MetricName("tasuki_trainer_samples_total", "counter", ("role",), "Samples whose gradients were computed.")
TRAINER_STEPS = MetricName(
    "tasuki_trainer_steps_total",
    "counter",
    ("role", "status"),
    "Optimizer steps; a skipped one had gradients that are not finite.",
)
LOG_PROB_GAP = MetricName(
    "tasuki_log_prob_gap",
    "gauge",
    ("stat",),
    "Mean and max difference between the trainer's and rollout's log-probs, of the last batch.",
)
STALENESS = MetricName(
    "tasuki_sample_staleness_versions",
    "histogram",
    (),
    "Optimizer steps between the weights that began a sample and those it trained.",
)
SPANS = MetricName(
    "tasuki_spans_total", "counter", ("outcome",), "Spans: sent, failed at the receiver, or dropped from a full queue."
)
RUN_STEP = MetricName("tasuki_run_step", "gauge", (), "The last step that the run on the node has finished.")
RUN_REWARD = MetricName("tasuki_run_reward", "gauge", ("name",), "Mean reward of the step's samples; each reward by its name.")
RUN_EVAL_SCORE = MetricName("tasuki_run_eval_score", "gauge", (), "The run's last held-out score.")
RUN_STEP_SECONDS = MetricName("tasuki_run_step_seconds", "gauge", ("part",), "Seconds of the run's last step, by part.")
RUN_METRIC = MetricName("tasuki_run_metric", "gauge", ("name",), "Each metric of the run's last step in metrics.jsonl.")

ALL = tuple(found for found in list(globals().values()) if isinstance(found, MetricName))
