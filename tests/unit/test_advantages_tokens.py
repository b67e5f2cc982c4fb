"""Advantages of single tokens, and the KL divergence in the reward, against their definitions in loops."""

import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.algorithms import advantages
from tasuki.algorithms.loss_types import KlEstimator
from tasuki.algorithms.setting import SettingError

lengths = st.lists(st.integers(0, 6), max_size=5)


def _random(lengths: list[int], seed: int) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(seed)
    num_tokens = sum(lengths)
    mask_N = (generator.random(num_tokens) < 0.7).astype(np.float32)
    return np.array(lengths, dtype=np.int64), mask_N, generator.normal(size=num_tokens), generator.normal(size=num_tokens)


def _spans(lengths: list[int]) -> list[range]:
    ends = np.cumsum(lengths).tolist()
    return [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]


@given(
    lengths=lengths, seed=st.integers(0, 1 << 20), discount=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.95, 0.0])
)
def test_gae_is_the_sum_of_discounted_errors_over_counted_tokens(lengths: list[int], seed: int, discount: float, lam: float):
    num_completion_S, mask_N, rewards_N, values_N = _random(lengths, seed)
    result_N, returns_N = advantages.gae(rewards_N, values_N, num_completion_S, discount=discount, lam=lam, loss_mask_N=mask_N)
    for span in _spans(lengths):
        counted = [t for t in span if mask_N[t]]
        ends = [*counted, span.stop][1:]
        rewards = [sum(rewards_N[t:end]) for t, end in zip(counted, ends, strict=True)]
        values = [*values_N[counted], 0.0]
        errors = [r + discount * values[i + 1] - values[i] for i, r in enumerate(rewards)]
        for i, t in enumerate(counted):
            expected = sum((discount * lam) ** (j - i) * errors[j] for j in range(i, len(errors)))
            assert result_N[t] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert (result_N[mask_N == 0] == 0).all()
    np.testing.assert_allclose(returns_N, result_N + values_N, rtol=1e-5, atol=1e-5)


@given(lengths=lengths, seed=st.integers(0, 1 << 20), discount=st.sampled_from([1.0, 0.9]))
def test_globally_whitened_returns(lengths: list[int], seed: int, discount: float) -> None:
    num_completion_S, mask_N, rewards_N, _ = _random(lengths, seed)
    rewards_N = np.where(mask_N > 0, rewards_N, 0.0)
    returns = {}
    for span in _spans(lengths):
        counted = [t for t in span if mask_N[t]]
        for i, t in enumerate(counted):
            returns[t] = sum(discount**k * rewards_N[u] for k, u in enumerate(counted[i:]))
    result_N = advantages.globally_whitened(rewards_N, num_completion_S, loss_mask_N=mask_N, discount=discount)
    assert result_N.dtype == np.float32
    mean = statistics.mean(returns.values()) if returns else 0.0
    std = math.sqrt((statistics.variance(returns.values()) if len(returns) > 1 else 0.0) + 1e-8)
    expected_N = [(returns[t] - mean) / std if t in returns else 0.0 for t in range(len(mask_N))]
    np.testing.assert_allclose(result_N, expected_N, rtol=1e-5, atol=1e-5)


def test_a_failed_reward_takes_its_sample_out() -> None:
    num_completion_S = np.array([2, 2, 1])
    rewards_N, values_N = np.array([0.0, 1.0, 0.0, math.nan, 3.0]), np.arange(5.0)
    kept = np.array([0, 1, 4])
    result_N = advantages.globally_whitened(rewards_N, num_completion_S)
    np.testing.assert_allclose(result_N[kept], advantages.globally_whitened(rewards_N[kept], np.array([2, 1])))
    assert (result_N[2:4] == 0).all()
    result_N, returns_N = advantages.gae(rewards_N, values_N, num_completion_S, discount=1.0, lam=0.9)
    assert (result_N[2:4] == 0).all()
    assert np.isfinite(result_N).all()
    assert (returns_N[2:4] == values_N[2:4]).all()


def test_whitened_counts_only_the_mask() -> None:
    result_N = advantages.whitened(np.array([1.0, 100.0, 3.0, 5.0]), loss_mask_N=np.array([1, 0, 1, 1]))
    np.testing.assert_allclose(result_N, [-1.0, 0.0, 0.0, 1.0], atol=1e-6)
    assert (advantages.whitened(np.ones(3), loss_mask_N=np.zeros(3)) == 0).all()
    assert (advantages.whitened(np.ones(1), loss_mask_N=np.ones(1)) == 0).all()


def test_explained_variance() -> None:
    returns_N, mask_N = np.array([1.0, 2.0, 3.0, 90.0]), np.array([1, 1, 1, 0])
    assert advantages.explained_variance(returns_N, returns_N) == 1.0
    assert advantages.explained_variance(np.full(4, 7.0), returns_N, loss_mask_N=mask_N) == pytest.approx(0.0)
    values_N = np.array([1.0, 1.0, 3.0, 0.0])
    assert advantages.explained_variance(values_N, returns_N, loss_mask_N=mask_N) == pytest.approx(1 - (2 / 9) / (2 / 3))
    assert math.isnan(advantages.explained_variance(returns_N, np.ones(4)))
    assert math.isnan(advantages.explained_variance(np.ones(2), np.ones(2), loss_mask_N=np.zeros(2)))


@pytest.mark.parametrize("estimator", KlEstimator)
def test_kl_penalties(estimator: KlEstimator) -> None:
    gaps = [0.0, 0.5, -0.5, 3.0]
    value = {"k1": lambda d: d, "k2": lambda d: d * d / 2}.get(estimator, lambda d: math.exp(-d) + d - 1)
    result_N = advantages.kl_penalties(np.array(gaps) - 2.0, np.full(4, -2.0), estimator=estimator)
    np.testing.assert_allclose(result_N, [value(gap) for gap in gaps], rtol=1e-9, atol=1e-12)


def test_huge_gaps_have_finite_penalties() -> None:
    for estimator in KlEstimator:
        result_N = advantages.kl_penalties(np.array([0.0, -5000.0]), np.array([-5000.0, 0.0]), estimator=estimator)
        assert np.isfinite(result_N).all()


def test_the_reward_falls_on_the_last_counted_token() -> None:
    result_N = advantages.token_rewards(
        np.array([1.0, 2.0, math.nan, 4.0, 8.0]),
        np.array([0.5, 1.0, 9.0, 0.25, 9.0, 1.0, 1.0]),
        np.array([3, 0, 1, 1, 2]),
        coef=0.1,
        loss_mask_N=np.array([1, 1, 0, 1, 0, 1, 1]),
    )
    np.testing.assert_allclose(result_N, [-0.05, 0.9, 0.0, math.nan, 0.0, -0.1, 7.9], rtol=1e-6)
    nothing = np.zeros(0)
    assert advantages.token_rewards(nothing, nothing, nothing.astype(np.int64), coef=0.1).shape == (0,)


def test_the_adaptive_coefficient_follows_the_clipped_error() -> None:
    for kl, change in ((6.6, 0.1), (60.0, 0.2), (0.0, -0.2)):
        coef = advantages.adapted_coef(0.2, kl, target=6.0, num_samples=500)
        assert coef == pytest.approx(0.2 * (1 + change * 0.05))


def test_equal_values_whiten_to_exactly_0_whatever_is_not_counted() -> None:
    values_N = np.array([0.1, 0.1, 7.0, 0.1])
    assert not advantages.whitened(values_N, loss_mask_N=np.array([1.0, 1.0, 0.0, 1.0])).any()
    assert not advantages.globally_whitened(np.array([0.0, 0.1, 0.1]), np.array([2, 1])).any()


FIVE, ONE, LENGTHS = np.ones(5), np.ones(1), np.array([2, 3])


@pytest.mark.parametrize(
    ("estimate", "argument"),
    [
        (lambda: advantages.whitened(FIVE, loss_mask_N=ONE), "loss_mask_N"),
        (lambda: advantages.whitened(np.ones((5, 1)), loss_mask_N=FIVE), "advantages_N"),
        (lambda: advantages.globally_whitened(ONE, LENGTHS), "rewards_N"),
        (lambda: advantages.globally_whitened(FIVE, LENGTHS, loss_mask_N=ONE), "loss_mask_N"),
        (lambda: advantages.gae(ONE, FIVE, LENGTHS, discount=1.0, lam=1.0), "rewards_N"),
        (lambda: advantages.gae(FIVE, ONE, LENGTHS, discount=1.0, lam=1.0), "values_N"),
        (lambda: advantages.gae(FIVE, FIVE, LENGTHS, discount=1.0, lam=1.0, loss_mask_N=ONE), "loss_mask_N"),
        (lambda: advantages.explained_variance(FIVE, ONE), "returns_N"),
        (lambda: advantages.kl_penalties(FIVE, ONE), "ref_log_probs_N"),
        (lambda: advantages.token_rewards(ONE, FIVE, LENGTHS, coef=0.1), "rewards_S"),
        (lambda: advantages.token_rewards(np.ones(2), ONE, LENGTHS, coef=0.1), "penalties_N"),
        (lambda: advantages.token_rewards(np.ones(2), FIVE, LENGTHS, coef=0.1, loss_mask_N=ONE), "loss_mask_N"),
        (lambda: advantages.explained_variance(FIVE, FIVE, loss_mask_N=ONE), "loss_mask_N"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_the_arguments_name(estimate: Callable[[], object], argument: str) -> None:
    with pytest.raises(SettingError, match=rf"^{argument}: has shape "):
        estimate()
