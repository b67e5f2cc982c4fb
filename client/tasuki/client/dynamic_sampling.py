"""Dynamic sampling: generate until enough groups teach something. Source: DAPO (arXiv:2503.14476) sec. 3.2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tasuki.algorithms.advantages import has_signal
from tasuki.client.types import Sample
from tasuki.wire.errors import InvalidArgument

_Group = TypeVar("_Group")


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The completions of one prompt, with their rewards."""

    prompt_token_ids: Sequence[int]
    samples: Sequence[Sample]
    """[G]"""
    rewards: NDArray[np.float32]
    """[G]; NaN for a sample that does not count."""
    greedy_reward: float | None = None
    """Of the prompt's greedy completion, for Estimator.GREEDY_BASELINE."""

    def differs(self) -> bool:
        """Whether the rewards differ: else the group teaches nothing."""
        counted = self.rewards[~np.isnan(self.rewards)]
        return len(counted) > 1 and bool(has_signal(counted[np.newaxis])[0])


@dataclass(frozen=True, slots=True, eq=False)
class Collected(Generic[_Group]):
    """The groups to learn from, and the price. Kept, equal and surplus groups add up to the generated ones."""

    groups: list[_Group]
    """In the order of their generation; fewer than asked for when max_batches came first."""
    num_batches: int
    num_generated: int
    """Groups; as many prompts were taken from the dataset."""
    num_equal: int
    """Thrown away by `is_kept`, since their rewards are equal."""
    num_surplus: int
    """Thrown away since there were enough."""


def groups_of(prompts: Sequence[Sequence[int]], samples: Sequence[Sample], rewards_PG: NDArray[np.float32]) -> list[Group]:
    """One group a prompt. samples: [P * G], those of the first prompt first, as `generate` returns them."""
    num_prompts, group_size = rewards_PG.shape
    if len(prompts) != num_prompts or len(samples) != rewards_PG.size:
        problem = f"{len(samples)} for {len(prompts)} prompts and rewards of shape {list(rewards_PG.shape)}"
        raise InvalidArgument("samples", problem)
    return [
        Group(prompt, samples[index * group_size : (index + 1) * group_size], rewards_PG[index])
        for index, prompt in enumerate(prompts)
    ]


def collect(
    generate: Callable[[int], Sequence[_Group]],
    *,
    num_groups: int,
    max_batches: int,
    is_kept: Callable[[_Group], bool],
) -> Collected[_Group]:
    """Keeps groups until there are `num_groups`, or until `max_batches` were generated.

    generate: makes and scores the groups of the next prompts; it gets the number that is missing and may return more or fewer. It takes
    its prompts from the dataset in order, so that `Dataset.position()` after this call is where the next step begins.
    is_kept: `Group.differs`, or another view of what teaches something, such as whether the answers differ in correctness alone.
    Raises what `generate` raises; to repeat the step, seek the position from before the call.
    """
    if num_groups < 1 or max_batches < 1:
        raise InvalidArgument("num_groups", f"is {num_groups} and max_batches {max_batches}; both must be at least 1")
    kept: list[_Group] = []
    num_batches = num_generated = 0
    while len(kept) < num_groups and num_batches < max_batches:
        batch = generate(num_groups - len(kept))
        kept += [group for group in batch if is_kept(group)]
        num_batches, num_generated = num_batches + 1, num_generated + len(batch)
    return Collected(
        kept[:num_groups],
        num_batches,
        num_generated,
        num_equal=num_generated - len(kept),
        num_surplus=max(len(kept) - num_groups, 0),
    )
