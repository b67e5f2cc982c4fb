"""Advantages from rewards of whole completions, against their definitions in loops."""

import dataclasses
import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.algorithms import advantages
from tasuki.algorithms.advantages import soft_overlong_penalty
from tasuki.algorithms.setting import SettingError

reward = st.one_of(st.integers(-3, 3).map(float), st.floats(-3, 3, width=16), st.just(math.nan))
groups = st.integers(1, 6).flatmap(
    lambda size: st.lists(st.lists(reward, min_size=size, max_size=size), min_size=1, max_size=5)
)


def _valid(group: list[float]) -> list[float]:
    return [x for x in group if not math.isnan(x)]


def _is_level(group: list[float]) -> bool:
    return len(set(_valid(group))) < 2


def _assert_equal(result: np.ndarray, expected: list[list[float]]) -> None:
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("std", ["none", "sample", "population"])
@given(rewards=groups)
def test_group_mean(std: advantages.Std, rewards: list[list[float]]) -> None:
    deviation = {"none": lambda _: 1.0, "sample": statistics.stdev, "population": statistics.pstdev}[std]
    floor = 0.0 if std == "none" else 1e-6
    expected = [
        [
            0.0
            if math.isnan(x) or _is_level(group)
            else (x - statistics.mean(_valid(group))) / (deviation(_valid(group)) + floor)
            for x in group
        ]
        for group in rewards
    ]
    _assert_equal(advantages.group_mean(np.array(rewards), std=std), expected)


@given(rewards=groups)
def test_leave_one_out(rewards: list[list[float]]) -> None:
    expected = [
        [
            0.0 if math.isnan(x) or _is_level(group) else x - statistics.mean(_valid(group[:i] + group[i + 1 :]))
            for i, x in enumerate(group)
        ]
        for group in rewards
    ]
    _assert_equal(advantages.leave_one_out(np.array(rewards)), expected)


@given(rewards=groups, seed=st.integers(0, 1000))
def test_group_baseline_whitened_weighs_samples_by_their_tokens(rewards: list[list[float]], seed: int) -> None:
    rewards_PG = np.array(rewards)
    num_counted_PG = np.random.default_rng(seed).integers(0, 5, rewards_PG.shape)
    centered = [[x - statistics.mean(_valid(group)) if not math.isnan(x) else math.nan for x in group] for group in rewards]
    tokens = [
        x
        for row, nums in zip(centered, num_counted_PG, strict=True)
        for x, n in zip(row, nums, strict=True)
        if x == x
        for _ in range(n)
    ]
    result_PG = advantages.group_baseline_whitened(rewards_PG, num_counted_PG=num_counted_PG)
    if not tokens:
        assert (result_PG == 0).all()
        return
    mean = statistics.mean(tokens)
    std = math.sqrt((statistics.variance(tokens) if len(tokens) > 1 else 0.0) + 1e-8)
    expected = [
        [(x - mean) / std if n and x == x else 0.0 for x, n in zip(row, nums, strict=True)]
        for row, nums in zip(centered, num_counted_PG, strict=True)
    ]
    np.testing.assert_allclose(result_PG, expected, rtol=1e-5, atol=1e-5)


def test_group_baseline_without_token_counts_has_mean_zero_and_variance_one() -> None:
    result_PG = advantages.group_baseline_whitened(np.random.default_rng(0).normal(size=(5, 4)))
    assert result_PG.mean() == pytest.approx(0.0, abs=1e-6)
    assert result_PG.var(ddof=1) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("std", ["none", "sample", "population"])
def test_equal_rewards_give_exact_zeros_and_have_no_signal(std: advantages.Std) -> None:
    # 0.1 has no exact binary form: the mean differs from it, and dividing by a tiny deviation would magnify the difference.
    rewards_PG = np.full((4, 7), 0.1, dtype=np.float32)
    rewards_PG[1, 3] = 0.7
    rewards_PG[2, 1:] = np.nan
    rewards_PG[3] = np.nan
    assert advantages.has_signal(rewards_PG).tolist() == [False, True, False, False]
    result_PG = advantages.group_mean(rewards_PG, std=std)
    assert (result_PG[[0, 2, 3]] == 0).all()
    assert (advantages.leave_one_out(rewards_PG)[[0, 2, 3]] == 0).all()
    assert result_PG[1].argmax() == 3


def test_rewards_that_differ_by_rounding_get_small_advantages() -> None:
    rewards_PG = np.array([[1.0, np.nextafter(np.float32(1), np.float32(2))]], dtype=np.float32)
    assert np.abs(advantages.group_mean(rewards_PG, std="sample")).max() < 0.1


def test_greedy_baseline_subtracts_the_greedy_reward_of_the_prompt() -> None:
    rewards_PG = np.array([[1.0, 0.0], [math.nan, 2.0], [1.0, 1.0]])
    result = advantages.greedy_baseline(rewards_PG, np.array([0.25, 1.0, math.nan]))
    _assert_equal(result, [[0.75, -0.25], [0.0, 1.0], [0.0, 0.0]])


def test_running_baseline_is_the_decayed_mean_of_past_batches() -> None:
    batches = [np.array([1.0, 3.0]), np.array([math.nan]), np.array([0.0]), np.array([4.0, math.nan])]
    baseline = advantages.RunningBaseline(decay=0.5)
    _assert_equal(baseline.advantages(batches[0]), [-1.0, 1.0])
    for batch in batches:
        baseline = baseline.updated(batch)
    mean = (0.125 * 2.0 + 0.25 * 0.0 + 0.5 * 4.0) / 0.875
    _assert_equal(baseline.advantages(np.array([1.0, math.nan])), [1.0 - mean, 0.0])
    restored = advantages.RunningBaseline(**dataclasses.asdict(baseline))
    assert restored == baseline


@pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan])
def test_a_running_baseline_must_forget(decay: float) -> None:
    with pytest.raises(ValueError, match="decay"):
        advantages.RunningBaseline(decay=decay)


def test_overlong_penalty_falls_linearly_within_the_buffer() -> None:
    lengths_S = np.array([0, 79, 80, 85, 90, 100, 120])
    result = soft_overlong_penalty(lengths_S, max_completion_tokens=100, buffer_tokens=20)
    _assert_equal(result, [0.0, 0.0, 0.0, -0.25, -0.5, -1.0, -1.0])


GROUPS_PG = np.ones((2, 3))
ROW = np.ones(3)


@pytest.mark.parametrize(
    ("estimate", "argument"),
    [
        (lambda: advantages.group_mean(ROW), "rewards_PG"),
        (lambda: advantages.leave_one_out(ROW), "rewards_PG"),
        (lambda: advantages.group_baseline_whitened(ROW), "rewards_PG"),
        (lambda: advantages.group_baseline_whitened(GROUPS_PG, num_counted_PG=np.ones((2, 1), dtype=int)), "num_counted_PG"),
        (lambda: advantages.greedy_baseline(ROW, ROW), "rewards_PG"),
        (lambda: advantages.greedy_baseline(GROUPS_PG, np.ones(1)), "greedy_rewards_P"),
        (lambda: advantages.greedy_baseline(GROUPS_PG, np.ones((2, 3))), "greedy_rewards_P"),
        (lambda: advantages.batch_baseline(GROUPS_PG), "rewards_S"),
        (lambda: advantages.RunningBaseline(total=1.0, weight=1.0).advantages(GROUPS_PG), "rewards_S"),
        (lambda: advantages.has_signal(ROW), "rewards_PG"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_the_arguments_name(estimate: Callable[[], object], argument: str) -> None:
    with pytest.raises(SettingError, match=rf"^{argument}: has shape "):
        estimate()
