"""The trainer's Prometheus metrics: tokens, steps, GPU time, and how far samples and rollout lag behind its weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from prometheus_client import CollectorRegistry

from tasuki.rpc.metrics import (
    LOG_PROB_GAP,
    POLICY_VERSION,
    STALENESS,
    TRAINER_SAMPLES,
    TRAINER_STEPS,
    TRAINER_TOKENS,
    GpuSeconds,
)
from tasuki.trainer.data.samples import Samples, starts
from tasuki.trainer.roles import Role
from tasuki.v1.trainer_pb2 import ForwardBackwardResponse, OptimStepResponse

_VERSIONS = (0, 1, 2, 4, 8, 16, 32)
_GAPS = {"log_prob_gap": "mean", "log_prob_gap_max": "max"}


class TrainerMetrics:
    """Metrics of callers' commands; a restart's replay is not counted again."""

    def __init__(self, registry: CollectorRegistry, *, num_gpus: int, policy_version: Callable[[], int]) -> None:
        self._gpu_seconds = GpuSeconds(registry, num_gpus=num_gpus)
        self._tokens, self._samples = TRAINER_TOKENS.counter(registry), TRAINER_SAMPLES.counter(registry)
        self._steps, self._gap = TRAINER_STEPS.counter(registry), LOG_PROB_GAP.gauge(registry)
        self._staleness = STALENESS.histogram(registry, buckets=_VERSIONS)
        POLICY_VERSION.gauge(registry).set_function(policy_version)

    @contextmanager
    def using(self, use: str) -> Iterator[None]:
        """Counts the time while the ranks work. use: "forward_backward", "optim_step", "score", "checkpoint"."""
        with self._gpu_seconds.using(use):
            yield

    def learned(self, role: Role, samples: Samples, answer: ForwardBackwardResponse, *, policy_version: int) -> None:
        self._tokens.labels(role).inc(answer.num_tokens)
        self._samples.labels(role).inc(answer.num_samples)
        if role is not Role.POLICY:
            return
        age_N = np.repeat(policy_version - samples.policy_version_S.astype(np.int64), samples.num_completion_S)
        if "version_lag" in samples.columns:
            age_N += samples.columns["version_lag"].astype(np.int64)
        for age in age_N[starts(samples.num_completion_S)].tolist():  # a sample's oldest token is its first
            self._staleness.observe(age)
        for name, stat in _GAPS.items():
            if name in answer.metrics:
                self._gap.labels(stat).set(answer.metrics[name])

    def stepped(self, role: Role, answer: OptimStepResponse) -> None:
        self._steps.labels(role, "skipped" if answer.is_skipped else "done").inc()
