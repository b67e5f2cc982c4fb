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
    """What happened from one changeover to rollout to the next; None where a part did not take place."""

    step: int
    policy_version: int | None = None
    """That made the samples and the evaluation."""
    eval_score: float | None = None
    mean_reward: float | None = None
    num_failed_rewards: int = 0
    num_skipped_groups: int = 0
    mean_num_tokens: float | None = None
    max_log_prob_gap: float | None = None
    mean_log_prob_gap: float | None = None
    clip_fraction: float | None = None
    entropy: float | None = None
    ref_kl: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """By part of the step; they add up to the step."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """By stage of the step's changeovers; inside to_rollout and to_train."""

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

    def next_version(self) -> int:
        """The policy version after the step."""
        return (self.policy_version or 0) + (self.grad_norm is not None)

    def total_seconds(self) -> float:
        return sum(self.seconds.values())


def _fits(name: str, value: object) -> bool:
    """Whether the field of a step may have the value."""
    if name in ("seconds", "stage_seconds"):
        return isinstance(value, dict) and all(isinstance(seconds, int | float) for seconds in value.values())
    if name in ("policy_version", "num_failed_rewards", "num_skipped_groups"):
        return isinstance(value, int) or (value is None and name == "policy_version")
    return value is None or isinstance(value, int | float)
