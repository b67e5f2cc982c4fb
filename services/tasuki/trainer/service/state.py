"""State of the trainer's front, shared by its two servicers, and its Prometheus metrics."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
from prometheus_client import CollectorRegistry

from tasuki.rpc.commands import CommandGate
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
from tasuki.trainer.wire import ROLES, Role
from tasuki.v1.trainer_pb2 import ForwardBackwardResponse, OptimStepResponse, RoleState
from tasuki.v1.weights_pb2 import LoadedCheckpoint
from tasuki.wire.errors import GradientsPending, StageOrder, WrongPhase
from tasuki.wire.stages import START, MemoryTag, Service, Stage, allowed_after

_LOADED = (None, Stage.LOAD_TRAINER)
_VERSIONS = (0, 1, 2, 4, 8, 16, 32)
_GAPS = {"log_prob_gap": "mean", "log_prob_gap_max": "max"}


@dataclass(slots=True)
class TrainerState:
    """Only the holder of `turn` may write it."""

    roles: dict[Role, RoleState]
    """State of every trained role."""
    stage: Stage | None = None
    """The last completed stage; None after a start."""
    published_version: int | None = None
    loaded: LoadedCheckpoint | None = None
    """The checkpoint loaded last, for the journal."""
    paused_tags: set[MemoryTag] = field(default_factory=set[MemoryTag])
    gate: CommandGate = field(default_factory=CommandGate)
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def policy_version(self) -> int:
        return self.roles[Role.POLICY].version

    @property
    def has_gradients(self) -> bool:
        """Whether any role has gradients."""
        return any(state.has_gradients for state in self.roles.values())

    def check_no_gradients(self, call: str) -> None:
        """Raises GradientsPending if `call` would lose accumulated gradients."""
        if self.has_gradients:
            raise GradientsPending(f"gradients are pending, and {call} would lose them: call OptimStep or DiscardGradients")

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """A turn in which the trainer is loaded. Raises WrongPhase if it is not."""
        async with self.turn:
            raise_unless_loaded(self.stage)
            yield


def roles_by_name(states: Sequence[RoleState]) -> dict[Role, RoleState]:
    """Role states as reported by the ranks."""
    return {ROLES[state.role]: state for state in states}


def raise_unless_next(stage: Stage, *, after: Stage | None) -> None:
    """Raises StageOrder unless `stage` may follow `after`.

    LOAD_TRAINER may come first: a trainer restarted during a changeover is already loaded. OFFLOAD may come without a publication: it
    undoes LOAD_TRAINER and makes room for an engine that starts.
    """
    if stage not in allowed_after(Service.TRAINER, after):
        raise _stage_order(stage, after=after)


def stage_after_withdrawal(after: Stage | None) -> Stage | None:
    """Undoes LOAD_WEIGHTS, so that training may continue. Does nothing without a publication; raises StageOrder while offloaded."""
    if after is Stage.OFFLOAD:
        raise _stage_order("WithdrawWeights", after=after)
    return Stage.LOAD_TRAINER if after is Stage.LOAD_WEIGHTS else after


def raise_unless_loaded(after: Stage | None) -> None:
    """Raises WrongPhase unless the trainer may train, score and save."""
    if after not in _LOADED:
        raise WrongPhase(f"the trainer is past {after}: acquire phase TRAIN first", needed="PHASE_TRAIN")


def _stage_order(asked: str, *, after: Stage | None) -> StageOrder:
    place, allowed = after or START, allowed_after(Service.TRAINER, after)[0]
    return StageOrder(
        f"{asked} is out of order: the trainer's last stage is {place}, next is {allowed}",
        stage=asked,
        after=place,
        allowed=allowed,
    )


class TrainerMetrics:
    """Metrics of callers' commands; a restart's replay is not counted again."""

    def __init__(self, registry: CollectorRegistry, *, num_gpus: int, policy_version: Callable[[], int]) -> None:
        self._gpu_seconds = GpuSeconds(registry, num_gpus=num_gpus)
        self._tokens, self._samples = TRAINER_TOKENS.counter(registry), TRAINER_SAMPLES.counter(registry)
        self._steps, self._gap = TRAINER_STEPS.counter(registry), LOG_PROB_GAP.gauge(registry)
        self._staleness = STALENESS.histogram(registry, buckets=_VERSIONS)
        POLICY_VERSION.gauge(registry).set_function(policy_version)

    def using(self, use: str) -> AbstractContextManager[None]:
        """Counts the time while the ranks work. use: "forward_backward", "optim_step", "score", "checkpoint"."""
        return self._gpu_seconds.using(use)

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
