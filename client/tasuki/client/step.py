"""The record of one step of a training loop: its figures, and where its time went."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tasuki.client.sync_client import Client
from tasuki.client.types import Phase


@dataclass(slots=True)
class Step:
    """What happened from one changeover to rollout to the next, or in one supervised step; None where a part did not take place."""

    step: int
    policy_version: int | None = None
    """That made the samples and the evaluation, or that a supervised step began with."""
    num_policy_steps: int = 0
    """Optimizer steps of the policy, each of which adds 1 to its version."""
    critic_version: int | None = None
    """The critic's before the updates of the step, if there is a critic."""
    num_critic_steps: int = 0
    """Optimizer steps of the critic."""
    eval_score: float | None = None
    mean_reward: float | None = None
    num_failed_rewards: int = 0
    num_equal_groups: int = 0
    """Groups of several completions whose rewards agree; also those that dynamic sampling leaves out."""
    num_skipped_updates: int = 0
    """Whose gradients were not finite."""
    mean_num_tokens: float | None = None
    grad_norm: float | None = None
    """Of the last update of the policy, as the learning rate."""
    learning_rate: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """What evaluation, advantages and losses report (docs/algorithms.md): means over the updates of the step, and maxima."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By part of the step; they add up to the step."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """By stage of the step's changeovers; inside to_rollout and to_train."""
    position: dict[str, int] = field(default_factory=dict)
    """Of the dataset after the step."""
    estimator: dict[str, float] = field(default_factory=dict)
    """What the next step's advantages go on from."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Step:
        """The step whose `asdict` was written as JSON; fields of another version of tasuki are left out. Raises TypeError."""
        if not isinstance(fields.get("step"), int):
            raise TypeError("`step` is no number")
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
        """The verbs do this by themselves; here it is called to see what each stage takes."""
        with self.timed(f"to_{phase.lower()}"):
            events = client.acquire(phase)
        self.stage_seconds |= {event.stage: event.seconds for event in events if event.stage and event.seconds}

    @property
    def is_evaluation(self) -> bool:
        """Whether nothing was made or learned in it: a run ends with such a step."""
        num_updates = self.num_policy_steps + self.num_critic_steps + self.num_skipped_updates
        return self.mean_reward is None and not num_updates

    def next_version(self) -> int:
        """The policy version after the step."""
        return (self.policy_version or 0) + self.num_policy_steps

    def total_seconds(self) -> float:
        return sum(self.seconds.values())


_TABLES = ("metrics", "seconds", "stage_seconds", "position", "estimator")
_COUNTS = ("num_policy_steps", "num_critic_steps", "num_failed_rewards", "num_equal_groups", "num_skipped_updates")
_VERSIONS = ("policy_version", "critic_version")


def _fits(name: str, value: object) -> bool:
    """Whether the field of a step may have the value."""
    if name in _TABLES:
        return isinstance(value, dict) and all(isinstance(number, int | float) for number in value.values())
    if name in _COUNTS or name in _VERSIONS:
        return isinstance(value, int) or (value is None and name in _VERSIONS)
    return value is None or isinstance(value, int | float)
