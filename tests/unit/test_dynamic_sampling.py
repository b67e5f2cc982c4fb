"""Sampling of a step: dynamic sampling and truncated completions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.client.dataset import Dataset
from tasuki.client.dynamic_sampling import Group, collect, groups_of
from tasuki.client.estimation import has_loss_tokens, without_truncated
from tasuki.client.step import truncated_fraction
from tasuki.client.types import FinishReason, Sample, TrainingSample
from tasuki.wire.errors import InvalidArgument


def _sample(reason: FinishReason) -> Sample:
    return Sample(0, 0, np.array([1], dtype=np.int32), np.zeros(1, dtype=np.float32), reason, 0)


def test_a_truncated_completion_is_masked_and_the_others_keep_their_mask():
    samples = [
        TrainingSample([1], [2, 3], advantages=1.0),
        TrainingSample([1], [2, 3], advantages=1.0),
        TrainingSample([1], [2, 3], loss_mask=[0, 1]),
        TrainingSample([1], [2, 3], loss_mask=[0, 1]),
    ]
    reasons = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.CUT, FinishReason.LENGTH]
    masked = without_truncated(samples, reasons)
    assert [list(sample.loss_mask) for sample in masked] == [[], [0, 0], [0, 1], [0, 0]]
    assert [sample.advantages for sample in masked[:2]] == [1.0, 1.0]
    assert has_loss_tokens(masked) and not has_loss_tokens([masked[1], masked[3]])
    with pytest.raises(ValueError):
        without_truncated(samples, reasons[:2])


def test_the_truncated_share_counts_length_alone():
    reasons = [FinishReason.LENGTH, FinishReason.STOP, FinishReason.CUT, FinishReason.LENGTH]
    assert truncated_fraction([_sample(reason) for reason in reasons]) == 0.5
    assert truncated_fraction([]) == 0.0


NAN = float("nan")


def _samples(num_prompts: int, group_size: int) -> list[Sample]:
    tokens, log_probs = np.array([1], dtype=np.int32), np.zeros(1, dtype=np.float32)
    places = np.ndindex(num_prompts, group_size)
    return [Sample(prompt, sample, tokens, log_probs, FinishReason.STOP, 0) for prompt, sample in places]


@given(
    batches=st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=8),
    num_groups=st.integers(1, 12),
    max_batches=st.integers(1, 8),
)
def test_every_group_is_kept_equal_or_surplus(batches: list[list[bool]], num_groups: int, max_batches: int):
    asked: list[int] = []

    def generate(num_missing: int) -> list[tuple[int, int, bool]]:
        number = len(asked)
        asked.append(num_missing)
        return [(number, place, differs) for place, differs in enumerate(batches[number % len(batches)])]

    found = collect(generate, num_groups=num_groups, max_batches=max_batches, is_kept=lambda group: group[2])
    assert found.num_batches == len(asked) <= max_batches
    assert found.num_generated == len(found.groups) + found.num_equal + found.num_surplus
    assert found.groups == sorted(found.groups) and all(differs for _, _, differs in found.groups)
    is_enough = len(found.groups) == num_groups
    assert is_enough or found.num_batches == max_batches
    assert is_enough or not found.num_surplus
    assert asked[0] == num_groups and all(missing > 0 for missing in asked)


def test_a_step_ends_where_the_next_begins_in_the_dataset():
    rows = list(range(40))
    dataset = Dataset(rows, seed=1)

    def generate(num_missing: int) -> Sequence[int]:
        return dataset.next_rows(num_missing)

    first = collect(generate, num_groups=8, max_batches=10, is_kept=lambda row: row % 3 == 0)
    position = dataset.position()
    second = collect(generate, num_groups=8, max_batches=10, is_kept=lambda row: row % 3 == 0)
    drawn = Dataset(rows, seed=1).next_rows(first.num_generated + second.num_generated)
    assert first.groups + second.groups == [row for row in drawn if row % 3 == 0]
    dataset.seek(position)
    assert collect(generate, num_groups=8, max_batches=10, is_kept=lambda row: row % 3 == 0).groups == second.groups


@pytest.mark.parametrize(
    ("rewards", "differs"),
    [
        ([1, 1, 1], False),
        ([1, 0, 1], True),
        ([1, NAN, 1], False),
        ([1, NAN, 0], True),
        ([1, NAN, NAN], False),
        ([NAN] * 3, False),
    ],
)
def test_a_group_differs_by_the_rewards_that_count(rewards: list[float], differs: bool):
    assert Group([1], _samples(1, 3), np.float32(rewards)).differs() is differs


def test_groups_take_their_prompts_samples_and_rewards():
    samples = _samples(3, 2)
    rewards_PG = np.arange(6, dtype=np.float32).reshape(3, 2)
    groups = groups_of([[1], [2], [3]], samples, rewards_PG)
    assert [group.prompt_token_ids for group in groups] == [[1], [2], [3]]
    assert [[sample.prompt_index for sample in group.samples] for group in groups] == [[0, 0], [1, 1], [2, 2]]
    np.testing.assert_array_equal([group.rewards for group in groups], rewards_PG)
    with pytest.raises(InvalidArgument, match="5 for 3 prompts"):
        groups_of([[1], [2], [3]], samples[:5], rewards_PG)
