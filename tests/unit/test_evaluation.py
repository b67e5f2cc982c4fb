"""Evaluation: valid settings, the estimate of pass@k against its definition, and figures from scores."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.client.evaluation import eval_figures, pass_at_k
from tasuki.client.rewards import Scores
from tasuki.config.train_schema import EvalConfig

NAN = float("nan")


def _scores(rewards: list[float], *, num_failed: int = 0, **by_name: list[float]) -> Scores:
    named = {name: np.float32(values) for name, values in (by_name or {"reward": rewards}).items()}
    return Scores(np.float32(rewards), num_failed, named)


@given(num_wrong=st.integers(0, 3000), num_right=st.integers(0, 3000), k=st.integers(1, 200))
def test_pass_at_k_of_many_samples_is_the_binomials(num_wrong: int, num_right: int, k: int):
    num_samples = num_wrong + num_right
    estimate = pass_at_k(np.array([[False] * num_wrong + [True] * num_right]), k)[0]
    if num_samples < k:
        assert math.isnan(estimate)
    else:
        assert estimate == pytest.approx(1 - math.comb(num_wrong, k) / math.comb(num_samples, k), abs=1e-9)


def test_pass_at_k_is_by_prompt_and_a_sample_that_does_not_count_is_not_there():
    correct_PG = np.array([[1, 0, 0, NAN], [0, 0, 0, 0], [1, NAN, NAN, NAN], [1, 1, 1, 0]])
    np.testing.assert_allclose(pass_at_k(correct_PG, 2), [2 / 3, 0, NAN, 1])
    np.testing.assert_allclose(pass_at_k(correct_PG, 1), [1 / 3, 0, 1, 3 / 4])


def test_figures_weigh_prompts_the_same():
    settings = EvalConfig(num_samples=2, temperature=0.7, pass_at=(1, 2))
    found = eval_figures(_scores([1, NAN, 0, 1.5]), settings)
    assert found == {"mean": pytest.approx(0.875), "pass@1": pytest.approx(0.75), "pass@2": pytest.approx(1.0)}


def test_figures_of_several_rewards_have_each_ones_mean():
    scores = _scores([1.5, 0.5], exact=[1.0, 0.0], format=[1.0, 1.0])
    assert eval_figures(scores, EvalConfig()) == {"mean": 1.0, "mean/exact": 0.5, "mean/format": 1.0}


def test_figures_have_no_more_digits_than_the_float32_rewards():
    assert eval_figures(_scores([0.992, 0.992]), EvalConfig()) == {"mean": 0.992}


def test_figures_have_the_share_of_failed_rewards():
    figures = eval_figures(_scores([1.0, 0.0, math.nan, 1.0], num_failed=1), EvalConfig())
    assert figures == {"mean": pytest.approx(2 / 3), "failed_fraction": 0.25}
