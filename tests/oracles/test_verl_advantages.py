"""Advantages against verl's functions. verl gives a group of one its reward and tasuki gives it 0, so groups here have two or more."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from padded_cases import SEEDS, SMALL_GAPS, Padded, assert_same, padded
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos

from tasuki.algorithms import advantages
from tasuki.algorithms.loss_types import KlEstimator

G = 4


def _groups(seed: int) -> tuple[Padded, np.ndarray, np.ndarray]:
    """Returns a batch of groups, the index of each sample's group, and rewards [P, G]."""
    case = padded(seed, group_size=G)
    num_groups = len(case.num_completion_S) // G
    return case, np.repeat(np.arange(num_groups), G), case.rewards_ST.sum(-1).numpy().reshape(num_groups, G)


def _assert_equal(ours_PG: np.ndarray, theirs_ST: torch.Tensor, case: Padded) -> None:
    ours_ST = torch.tensor(ours_PG).reshape(-1, 1) * case.mask_ST
    assert_same(ours_ST, theirs_ST * case.mask_ST, atol=1e-7)


@pytest.mark.parametrize("std", ["sample", "none"])
def test_grpo(std: advantages.Std) -> None:
    for seed in SEEDS:
        case, index, rewards_PG = _groups(seed)
        theirs_ST, _ = core_algos.compute_grpo_outcome_advantage(
            case.rewards_ST, case.mask_ST, index, norm_adv_by_std_in_grpo=std == "sample"
        )
        _assert_equal(advantages.group_mean(rewards_PG, std=std), theirs_ST, case)


def test_leave_one_out() -> None:
    for seed in SEEDS:
        case, index, rewards_PG = _groups(seed)
        for estimate in (core_algos.compute_rloo_outcome_advantage, core_algos.compute_rloo_vectorized_outcome_advantage):
            theirs_ST, _ = estimate(case.rewards_ST, case.mask_ST, index)
            _assert_equal(advantages.leave_one_out(rewards_PG), theirs_ST, case)


def test_group_baseline_whitened() -> None:
    for seed in SEEDS:
        case, index, rewards_PG = _groups(seed)
        theirs_ST, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(case.rewards_ST, case.mask_ST, index)
        num_counted_PG = case.mask_ST.sum(-1).numpy().reshape(rewards_PG.shape)
        ours_PG = advantages.group_baseline_whitened(rewards_PG, num_counted_PG=num_counted_PG)
        _assert_equal(ours_PG, theirs_ST, case)


@pytest.mark.parametrize("discount", [1.0, 0.97])
def test_globally_whitened(discount: float) -> None:
    for seed in SEEDS:
        case = padded(seed)
        theirs_ST, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
            case.rewards_ST, case.mask_ST, AlgoConfig(gamma=discount)
        )
        rewards_N, mask_N = (case.flat(x_ST).numpy() for x_ST in (case.rewards_ST, case.mask_ST))
        ours_N = advantages.globally_whitened(rewards_N, case.num_completion_S, loss_mask_N=mask_N, discount=discount)
        assert_same(torch.tensor(ours_N), case.flat(theirs_ST), atol=1e-7)


def test_greedy_baseline() -> None:
    """verl computes returns to go; with a reward on the last token they are the same for every token."""
    for seed in SEEDS:
        case, _, rewards_PG = _groups(seed)
        rewards_ST = torch.zeros_like(case.rewards_ST)
        rewards_ST[torch.arange(len(rewards_ST)), case.num_completion_S - 1] = torch.tensor(rewards_PG.reshape(-1))
        greedy_P = np.random.default_rng(seed).normal(size=len(rewards_PG))
        theirs_ST, _ = core_algos.compute_remax_outcome_advantage(
            rewards_ST, torch.tensor(np.repeat(greedy_P, G)), case.mask_ST
        )
        _assert_equal(advantages.greedy_baseline(rewards_PG, greedy_P), theirs_ST, case)


@pytest.mark.parametrize(("discount", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9)])
def test_gae(discount: float, lam: float) -> None:
    for seed in SEEDS:
        case = padded(seed)
        theirs_ST, their_returns_ST = core_algos.compute_gae_advantage_return(
            case.rewards_ST, case.values_ST, case.mask_ST, discount, lam
        )
        rewards_N, values_N, mask_N = (case.flat(x).numpy() for x in (case.rewards_ST, case.values_ST, case.mask_ST))
        ours_N, returns_N = advantages.gae(
            rewards_N, values_N, case.num_completion_S, discount=discount, lam=lam, loss_mask_N=mask_N
        )
        is_counted_N = mask_N > 0
        assert_same(torch.tensor(returns_N)[is_counted_N], case.flat(their_returns_ST)[is_counted_N], atol=1e-6)
        whitened_N = advantages.whitened(ours_N, loss_mask_N=mask_N)
        # tasuki's advantages are float32 between the two steps; verl computes in float64 throughout.
        assert_same(torch.tensor(whitened_N)[is_counted_N], case.flat(theirs_ST)[is_counted_N], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("estimator", "name"), [(KlEstimator.K1, "k1"), (KlEstimator.K2, "k2"), (KlEstimator.K3, "k3")])
def test_kl_in_the_reward(estimator: KlEstimator, name: str) -> None:
    for seed in SEEDS:
        case = padded(seed, spreads=SMALL_GAPS)  # verl caps k3 at 10
        penalties_ST = core_algos.kl_penalty(case.log_probs_ST, case.ref_log_probs_ST, name) * case.mask_ST
        scores_S = np.random.default_rng(seed).normal(size=len(case.num_completion_S))
        theirs_ST = -0.1 * penalties_ST
        theirs_ST[torch.arange(len(scores_S)), case.num_completion_S - 1] += torch.tensor(scores_S)
        ours_N = advantages.token_rewards(
            scores_S,
            advantages.kl_penalties(
                case.flat(case.log_probs_ST).numpy(), case.flat(case.ref_log_probs_ST).numpy(), estimator=estimator
            ),
            case.num_completion_S,
            coef=0.1,
            loss_mask_N=case.flat(case.mask_ST).numpy(),
        )
        assert_same(torch.tensor(ours_N), case.flat(theirs_ST), atol=1e-7)


def test_adaptive_coefficient() -> None:
    generator = np.random.default_rng(0)
    ours = 0.2
    theirs = core_algos.AdaptiveKLController(init_kl_coef=0.2, target_kl=6.0, horizon=10_000)
    for _ in SEEDS:
        kl, num_samples = generator.uniform(0, 15), int(generator.integers(1, 1024))
        ours = advantages.adapted_coef(ours, kl, target=6.0, num_samples=num_samples)
        theirs.update(kl, num_samples)
        assert ours == pytest.approx(theirs.value, rel=1e-12)
