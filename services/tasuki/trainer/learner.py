"""Training state of one rank: roles, their versions and schedules, and the losses of their networks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tasuki.algorithms.batch import LossSum, Metric
from tasuki.algorithms.loss_types import LossConfig
from tasuki.algorithms.objective import policy_loss, value_loss
from tasuki.config.trainer_schema import OptimizerConfig, TrainerConfig
from tasuki.trainer.backend import Backend, Progress
from tasuki.trainer.data.micro_batch import MicroBatch, TokenBatch
from tasuki.trainer.wire import Role
from tasuki.v1.ranks_pb2 import RankLossReport, RankPublished
from tasuki.v1.trainer_pb2 import MetricPart, OptimStepResponse
from tasuki.wire.errors import GradientsNotFinite, InvalidArgument


@dataclass(slots=True)
class RoleState:
    """A trained role; equal on every rank."""

    optimizer: OptimizerConfig
    version: int = 0
    """Number of optimizer steps in its weights, and of loads of older checkpoints before them."""
    schedule_start: int = 0
    """Version at which its schedule starts."""
    has_gradients: bool = False


class Learner:
    """One rank's learner. All ranks make the same calls in the same order."""

    def __init__(
        self,
        backend: Backend,
        *,
        optimizers: Mapping[Role, OptimizerConfig],
        skips_non_finite: bool = False,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        """optimizers: of the trained roles. progressed: called after each micro-batch and while a checkpoint is read.

        skips_non_finite: discards non-finite gradients and reports the step as skipped; otherwise optim_step raises.
        """
        self.backend = backend
        self.roles = {role: RoleState(config) for role, config in optimizers.items()}
        self._skips_non_finite, self._progressed = skips_non_finite, progressed

    @property
    def policy_version(self) -> int:
        return self.roles[Role.POLICY].version

    def begin_run(self, *, keep_optimizer: bool) -> None:
        """Restarts every schedule at step 0 and resets optimizer state unless it is kept."""
        for role, state in self.roles.items():
            state.schedule_start = state.version
            if not keep_optimizer:
                self.backend.reset_optimizer(role)

    def forward_backward(
        self, role: Role, micro_batches: Sequence[MicroBatch], *, config: LossConfig, returns_log_probs: bool = False
    ) -> RankLossReport:
        """Accumulates the gradients of the loss over this rank's micro-batches. Returns this rank's part of the losses and metrics.

        config: with the denominator of the whole call. returns_log_probs: also returns the policy's log-probs.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.backend.device)
        metrics: dict[str, Metric] = {}
        kept: list[Tensor] = []
        try:
            for batch in micro_batches:
                part = self._loss(role, batch, config=config, kept=kept if returns_log_probs else None)
                self.backend.backward(role, part.loss, share=batch.share)
                total += part.loss.detach()
                metrics = _merged(metrics, part.metrics)
                self._progressed()
        except BaseException:
            # A later pass would compute with what is gathered, even after a step or a checkpoint.
            self.backend.release_gathered(role)
            raise
        self.roles[role].has_gradients = True
        report = _report(total, {**metrics, **self.backend.routing_metrics(role)})
        report.log_probs.extend(log_probs_N.float().cpu().numpy().tobytes() for log_probs_N in kept)
        return report

    def optim_step(
        self,
        role: Role,
        *,
        learning_rate: float | None = None,
        schedule_step: int | None = None,
        schedule_steps: int | None = None,
    ) -> OptimStepResponse:
        """Clips the role's gradients, takes one optimizer step and clears them.

        learning_rate: overrides the schedule's. schedule_step: position in the schedule; by default, steps since begin_run.
        schedule_steps: its length. Raises InvalidArgument without a length that the schedule needs, and GradientsNotFinite, with the
        gradients cleared, unless such steps are skipped. In a fleet raises VersionOrder, with nothing changed, if nodes differ, and
        PeerUnavailable if one is lost, after which this rank is unusable.
        """
        state = self.roles[role]
        step = state.version - state.schedule_start if schedule_step is None else schedule_step
        rate = scheduled_rate(state.optimizer, step, num_steps=schedule_steps) if learning_rate is None else learning_rate
        self.backend.check_alike({f"version of the {role}": state.version, "learning_rate": rate})
        grad_norm = self.backend.clip_gradients(role)
        if not math.isfinite(grad_norm):
            self.discard_gradients(role)
            if not self._skips_non_finite:
                raise GradientsNotFinite(
                    f"the {role}'s gradient norm is {grad_norm}; the gradients are discarded, nothing else changed"
                )
            return OptimStepResponse(version=state.version, grad_norm=grad_norm, learning_rate=rate, is_skipped=True)
        self.backend.step_optimizer(role, learning_rate=rate)
        self.discard_gradients(role)
        state.version += 1
        return OptimStepResponse(version=state.version, grad_norm=grad_norm, learning_rate=rate)

    def discard_gradients(self, role: Role) -> None:
        self.backend.clear_gradients(role)
        self.roles[role].has_gradients = False

    @torch.no_grad()
    def score(self, role: Role, batches: Sequence[TokenBatch]) -> list[Tensor]:
        """Computes log-probs of the policy or reference, or values of the critic: [N] float32 for each batch, in host memory."""
        scores: list[Tensor] = []
        try:
            for batch in batches:
                score_N = self.backend.score_values(batch) if role is Role.CRITIC else self.backend.score_tokens(role, batch)[0]
                scores.append(score_N.float().cpu())
                self._progressed()
        finally:
            self.backend.release_gathered(role)
        return scores

    def publish(self) -> RankPublished:
        """Makes the policy's weights available for rollout to map. Raises OutOfGpuMemory."""
        return self.backend.publication.publish(self.policy_version)

    def save_checkpoint(self, path: Path, *, save_id: str | None = None) -> int:
        """Saves a checkpoint or, with `save_id`, writes one for a later publication. Returns the bytes written."""
        progress = {role: Progress(state.version, state.schedule_start) for role, state in self.roles.items()}
        return self.backend.save_checkpoint(path, progress=progress, save_id=save_id)

    def check_checkpoint(self, path: Path) -> int:
        """Returns the policy version of a checkpoint if it could be loaded."""
        return self.backend.check_checkpoint(path)[Role.POLICY].version

    def load_checkpoint(self, path: Path, *, as_version: int | None = None) -> None:
        """Loads a checkpoint and clears the gradients. On error nothing has changed.

        as_version: the policy's version; by default the checkpoint's, or one above the present one if that is newer.
        """
        newest = self.policy_version
        loaded = self.backend.load_checkpoint(path, progressed=self._progressed)
        for role, state in self.roles.items():
            state.version, state.schedule_start = loaded[role]
            self.discard_gradients(role)
        policy = self.roles[Role.POLICY]
        if as_version is None:
            as_version = policy.version if policy.version >= newest else newest + 1
        # The schedule goes on from the checkpoint's step.
        policy.schedule_start += as_version - policy.version
        policy.version = as_version

    def _loss(self, role: Role, batch: MicroBatch, *, config: LossConfig, kept: list[Tensor] | None) -> LossSum:
        if role is Role.CRITIC:
            return value_loss(config, values_N=self.backend.score_values(batch.tokens), batch=batch.loss)
        log_probs_N, entropy_N = self.backend.score_tokens(role, batch.tokens)
        if kept is not None:
            kept.append(log_probs_N.detach())
        return policy_loss(config, log_probs_N=log_probs_N, entropy_N=entropy_N, batch=batch.loss)


def trained_roles(config: TrainerConfig) -> Mapping[Role, OptimizerConfig]:
    """The policy, and the critic if there is one."""
    critic = config.critic_optimizer
    return {Role.POLICY: config} | ({} if critic is None else {Role.CRITIC: critic})


def scheduled_rate(config: OptimizerConfig, step: int, *, num_steps: int | None) -> float:
    """Learning rate of the step after `step` completed ones of `num_steps`.

    Rises linearly to its peak, reached in the first step after the warm-up, then is constant or falls to 0 at `num_steps`. Raises
    InvalidArgument without a length that the schedule needs.
    """
    peak, warmup_steps = config.learning_rate, config.warmup_steps
    if config.lr_schedule != "constant" and not num_steps:
        problem = f'is needed with trainer.lr_schedule = "{config.lr_schedule}": give the number of steps, or the learning_rate of each'
        raise InvalidArgument("schedule_steps", problem)
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if config.lr_schedule == "constant" or not num_steps:
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return peak * (1.0 - progress if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress)))


def _merged(one: Mapping[str, Metric], other: Mapping[str, Metric]) -> dict[str, Metric]:
    return {**one, **{name: one[name].merge(metric) if name in one else metric for name, metric in other.items()}}


def _report(loss: Tensor, metrics: Mapping[str, Metric]) -> RankLossReport:
    """Transfers everything to the host in one copy."""
    values = [loss, *(part for metric in metrics.values() for part in (metric.total, metric.weight))]
    numbers = torch.stack([value.detach().to(torch.float64) for value in values]).tolist()
    parts = zip(numbers[1::2], numbers[2::2], metrics.items(), strict=True)
    return RankLossReport(
        loss=numbers[0],
        metrics={
            name: MetricPart(total=total, weight=weight, is_maximum=metric.kind == "max")
            for total, weight, (name, metric) in parts
        },
    )
