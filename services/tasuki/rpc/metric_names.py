"""Every metric of ours by name: kind, labels and meaning. docs/reference/metrics.md and the dashboard in deploy/ have the same names.

The labels `service`, and of `grpc_server_*` those of go-grpc-middleware, are added where all services meet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


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
PHASE = MetricName("tasuki_phase", "gauge", ("phase",), "1 for where the node is: TRAIN, ROLLOUT or CHANGEOVER.")
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
