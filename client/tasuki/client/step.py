"""The record of one training step: its metrics and how long each part took."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tasuki.client.rewards import Scores
from tasuki.client.sync_client import Client
from tasuki.client.types import FinishReason, Phase, Sample, Stage


@dataclass(slots=True)
class Step:
    """One step of a training loop. Fields of parts that did not run are None."""

    step: int
    policy_version: int | None = None
    """Version that generated the samples and was evaluated, or that a supervised step started from."""
    num_policy_steps: int = 0
    """Optimizer steps of the policy; each adds 1 to its version."""
    critic_version: int | None = None
    """The critic's version before the step's updates; None without a critic."""
    num_critic_steps: int = 0
    """Optimizer steps of the critic."""
    eval_score: float | None = None
    mean_reward: float | None = None
    """None also if every reward failed."""
    num_failed_rewards: int = 0
    num_equal_groups: int = 0
    """Groups of several completions with equal rewards, including those that dynamic sampling discards."""
    num_failed_groups: int = 0
    """Those of them in which a reward failed."""
    num_skipped_updates: int = 0
    """Updates skipped because their gradients were not finite."""
    mean_num_tokens: float | None = None
    grad_norm: float | None = None
    """Gradient norm of the policy's last update; learning_rate is also the last update's."""
    learning_rate: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of evaluation, advantages and losses (docs/reference/algorithms.md): means over the step's updates; maxima: the largest."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the step. Their sum is the duration of the step."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each stage of the step's changeovers. to_rollout and to_train have only what the loop waited for."""
    position: dict[str, int] = field(default_factory=dict)
    """Position in the dataset after the step."""
    estimator: dict[str, float] = field(default_factory=dict)
    """Estimator state carried over to the next step."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Step":
        """Reads a step written as JSON by `asdict`. Ignores fields of other versions of tasuki. Raises TypeError for a bad value."""
        if not isinstance(fields.get("step"), int):
            raise TypeError("`step` is not a number")
        known = {name: value for name, value in fields.items() if name in cls.__slots__}
        for name, value in known.items():
            if not _fits(name, value):
                raise TypeError(f"`{name}` is {value!r}")
        return cls(**known)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - started

    def acquire(self, client: Client, phase: Phase) -> None:
        """Acquires a phase explicitly, to time its stages; the verbs would do it implicitly."""
        with self.timed(f"to_{phase.lower()}"):
            events = client.acquire(phase)
        self.stage_seconds |= {stage: event.seconds for event in events if (stage := Stage.of(event.stage)) and event.seconds}

    def begin_acquire(self, client: Client, phase: Phase) -> None:
        """Begins a changeover that the next `acquire` waits for. Waits here for one that was begun before."""
        with self.timed(f"to_{phase.lower()}"):
            client.begin_acquire(phase)

    @property
    def is_evaluation(self) -> bool:
        """Whether the step only evaluated, as the last step of a run does."""
        num_updates = self.num_policy_steps + self.num_critic_steps + self.num_skipped_updates
        return self.mean_reward is None and self.mean_num_tokens is None and not num_updates

    @property
    def why_no_update(self) -> str:
        """Why a step that generated changed no weights; empty for other steps."""
        if self.is_evaluation or self.num_policy_steps + self.num_critic_steps + self.num_skipped_updates:
            return ""
        if self.mean_reward is None:
            return "every reward failed"
        if self.num_equal_groups and not self.metrics.get("signal_fraction"):
            num_groups, num_failed = self.num_equal_groups, self.num_failed_groups
            counts = {"equal": num_groups - num_failed, "failed": num_failed}
            return ", ".join(f"{count} of {num_groups} groups have {kind} rewards" for kind, count in counts.items() if count)
        return "no counted token has an advantage"

    def next_version(self) -> int:
        """The policy version after the step."""
        return (self.policy_version or 0) + self.num_policy_steps

    def total_seconds(self) -> float:
        return sum(self.seconds.values())


_TABLES = ("metrics", "seconds", "stage_seconds", "position", "estimator")
_COUNTS = (
    "num_policy_steps",
    "num_critic_steps",
    "num_failed_rewards",
    "num_equal_groups",
    "num_failed_groups",
    "num_skipped_updates",
)
_VERSIONS = ("policy_version", "critic_version")


def _fits(name: str, value: object) -> bool:
    """Whether `value` has a type that the field accepts."""
    if name in _TABLES:
        return isinstance(value, dict) and all(isinstance(number, int | float) for number in value.values())
    if name in _COUNTS or name in _VERSIONS:
        return isinstance(value, int) or (value is None and name in _VERSIONS)
    return value is None or isinstance(value, int | float)


def measure_samples(step: Step, generated: Sequence[tuple[list[Sample], Scores]], *, group_size: int) -> None:
    """Adds metrics of the generated samples to the step, including samples not trained on. Needs `step.num_equal_groups`."""
    samples = [sample for made, _ in generated for sample in made]
    rewards_S = np.concatenate([scores.rewards for _, scores in generated])
    step.num_failed_rewards = sum(scores.num_failed for _, scores in generated)
    if np.isfinite(rewards_S).any():
        step.mean_reward = shortest(rewards_S[np.isfinite(rewards_S)].mean())
    step.mean_num_tokens = float(np.mean([len(sample.token_ids) for sample in samples]))
    step.metrics["truncated_fraction"] = truncated_fraction(samples)
    step.metrics["inexact_fraction"] = sum(not sample.has_exact_log_probs for sample in samples) / len(samples)
    if group_size > 1:
        step.metrics["signal_fraction"] = 1.0 - step.num_equal_groups / (len(samples) // group_size)
        spread = np.ma.masked_invalid(rewards_S.reshape(-1, group_size)).std(axis=1).mean()
        step.metrics["reward_std"] = 0.0 if np.ma.is_masked(spread) else float(spread)
    names = generated[0][1].by_name
    for name in names if len(names) > 1 else ():
        values_S = np.concatenate([scores.by_name[name] for _, scores in generated])
        if np.isfinite(values_S).any():
            step.metrics[f"reward/{name}"] = shortest(values_S[np.isfinite(values_S)].mean())


def shortest(value: np.floating) -> float:
    """The number of fewest digits with the float32 value: 0.992, not 0.9919999837875366. Rewards are float32."""
    return float(str(np.float32(value)))


def averaged(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combines finite metrics over a step's updates: means, and for maxima the largest."""
    values: dict[str, list[float]] = {}
    for metrics in measured:
        for name, value in metrics.items():
            if math.isfinite(value):
                values.setdefault(name, []).append(value)
    return {name: max(each) if name.endswith("_max") else sum(each) / len(each) for name, each in values.items()}


def truncated_fraction(samples: Sequence[Sample]) -> float:
    """Share of samples truncated at max_new_tokens; 0 without samples."""
    return sum(sample.finish_reason is FinishReason.LENGTH for sample in samples) / max(len(samples), 1)
