"""Dynamic sampling: generate until enough groups have a gradient. Source: DAPO (arXiv:2503.14476) sec. 3.2."""

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
    """The completions of one prompt and their rewards."""

    prompt_token_ids: Sequence[int]
    samples: Sequence[Sample]
    """[G]"""
    rewards: NDArray[np.float32]
    """[G]; NaN for excluded samples."""
    greedy_reward: float | None = None
    """Reward of the prompt's greedy completion, for Estimator.GREEDY_BASELINE."""

    def differs(self) -> bool:
        """Whether the rewards differ. Equal rewards give no gradient."""
        counted = self.rewards[~np.isnan(self.rewards)]
        return len(counted) > 1 and bool(has_signal(counted[np.newaxis])[0])


@dataclass(frozen=True, slots=True, eq=False)
class Collected(Generic[_Group]):
    """The groups kept for training and the number discarded. Kept, equal and surplus groups add up to those generated."""

    groups: list[_Group]
    """In order of generation. Fewer than requested if max_batches was reached."""
    num_batches: int
    num_generated: int
    """Groups generated, one for each prompt taken from the dataset."""
    num_equal: int
    """Discarded by `is_kept`: their rewards are equal."""
    num_surplus: int
    """Discarded because there were already enough."""


def groups_of(prompts: Sequence[Sequence[int]], samples: Sequence[Sample], rewards_PG: NDArray[np.float32]) -> list[Group]:
    """Splits samples into one group per prompt. samples: [P * G], ordered by prompt, as `generate` returns them."""
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
    """Generates until `num_groups` groups are kept, or `max_batches` batches were generated.

    generate: generates and scores the groups of the next prompts. It is called with the number still missing and may return more or
    fewer. It must take prompts from the dataset in order, so that `Dataset.position()` afterwards is where the next step starts.
    is_kept: defaults to `Group.differs`; may apply another criterion, such as differing correctness only.
    Raises what `generate` raises. To repeat the step, seek to the position before the call.
    """
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
