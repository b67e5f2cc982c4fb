"""The learning rate of every step."""

import pytest

from tasuki.trainer.learner import learning_rate_at


def test_constant_stays_at_its_peak_after_the_warm_up() -> None:
    rates = [learning_rate_at(step, peak=1.0, schedule="constant", warmup_steps=3, total_steps=None) for step in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_zero_and_stays_there() -> None:
    rates = [learning_rate_at(step, peak=1.0, schedule="linear", warmup_steps=0, total_steps=4) for step in range(6)]
    assert rates == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_cosine_is_half_way_down_in_the_middle() -> None:
    rates = [learning_rate_at(step, peak=2.0, schedule="cosine", warmup_steps=2, total_steps=6) for step in (1, 2, 4, 6, 9)]
    assert rates == pytest.approx([4 / 3, 2.0, 1.0, 0.0, 0.0])


def test_a_warm_up_longer_than_the_schedule_ends_in_zero() -> None:
    assert learning_rate_at(5, peak=1.0, schedule="linear", warmup_steps=5, total_steps=5) == 1.0
    assert learning_rate_at(6, peak=1.0, schedule="linear", warmup_steps=5, total_steps=5) == 0.0
