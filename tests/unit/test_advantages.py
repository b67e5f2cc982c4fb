"""Advantages of groups, against figures worked out by hand."""

from __future__ import annotations

import numpy as np

from tasuki.client.advantages import group_advantages, has_signal


def test_without_std_an_advantage_is_the_reward_minus_its_groups_mean():
    rewards_PG = np.array([[1, 0, 0, 1], [3, 1, 1, 1]], dtype=np.float32)
    expected = np.array([[0.5, -0.5, -0.5, 0.5], [1.5, -0.5, -0.5, -0.5]], dtype=np.float32)
    np.testing.assert_allclose(group_advantages(rewards_PG, normalize_std=False), expected, atol=1e-7)


def test_with_std_a_group_has_unit_variance_whatever_its_scale():
    rewards_PG = np.array([[1, 0, 0, 1], [300, 100, 100, 100]], dtype=np.float32)
    advantages_PG = group_advantages(rewards_PG)
    np.testing.assert_allclose(advantages_PG.std(axis=1), [1, 1], rtol=1e-4)
    np.testing.assert_allclose(advantages_PG[0], [1, -1, -1, 1], rtol=1e-4)


def test_a_group_of_equal_rewards_gets_exact_zeros_and_has_no_signal():
    # 0.1 is no binary fraction: its mean is not exactly itself, and dividing by a tiny std would blow the difference up.
    rewards_PG = np.full((2, 7), 0.1, dtype=np.float32)
    rewards_PG[1, 3] = 0.7
    assert has_signal(rewards_PG).tolist() == [False, True]
    advantages_PG = group_advantages(rewards_PG)
    assert (advantages_PG[0] == 0).all()
    assert advantages_PG[1].argmax() == 3


def test_a_group_of_one_has_no_signal():
    assert has_signal(np.ones((3, 1), dtype=np.float32)).tolist() == [False, False, False]
    assert (group_advantages(np.ones((3, 1), dtype=np.float32)) == 0).all()


def test_rewards_that_differ_by_rounding_get_small_advantages():
    rewards_PG = np.array([[1.0, np.nextafter(np.float32(1), np.float32(2))]], dtype=np.float32)
    assert np.abs(group_advantages(rewards_PG)).max() < 0.1
