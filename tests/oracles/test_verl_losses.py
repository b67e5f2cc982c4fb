"""Losses and their gradients against verl's functions."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from padded_cases import SEEDS, SMALL_GAPS, assert_same, loss_batch, padded
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

from tasuki.algorithms.loss_types import Aggregation, Correction, KlEstimator, LossConfig, OldPolicy
from tasuki.algorithms.losses.cispo import CispoLoss
from tasuki.algorithms.losses.gspo import GspoLoss
from tasuki.algorithms.losses.policy_gradient import PolicyGradientLoss
from tasuki.algorithms.losses.ppo import PpoLoss
from tasuki.algorithms.losses.sapo import SapoLoss
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.algorithms.objective import kl_divergence, policy_loss, value_loss

UNCORRECTED = Correction(token_truncation=None)
LENGTH = 32
MODES = {
    Aggregation.TOKEN_MEAN: "token-mean",
    Aggregation.SEQUENCE_MEAN_TOKEN_SUM: "seq-mean-token-sum",
    Aggregation.SEQUENCE_MEAN_TOKEN_MEAN: "seq-mean-token-mean",
    Aggregation.CONSTANT: "seq-mean-token-sum-norm",
}
ESTIMATORS = {KlEstimator.K1: "k1", KlEstimator.K2: "k2", KlEstimator.K3: "k3", KlEstimator.K3_STRAIGHT_THROUGH: "k3+"}


def _config(loss, aggregation: Aggregation, **settings) -> LossConfig:
    length = LENGTH if aggregation is Aggregation.CONSTANT else None
    return LossConfig(loss=loss, aggregation=aggregation, aggregation_length=length, **settings)


def _actor(loss) -> ActorConfig:
    """The dual clip is always on in verl; 1e9 disables it."""
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=loss.clip_low,
        clip_ratio_high=loss.clip_high,
        clip_ratio_c=getattr(loss, "dual_clip", None) or 1e9,
        loss_scale_factor=LENGTH,
    )
    config.global_batch_info["loss_scale_factor"] = LENGTH
    return config


def _assert_equal(ours, theirs, log_probs_N: torch.Tensor) -> None:
    assert_same(ours, theirs)
    (grad_N,), (their_grad_N,) = (torch.autograd.grad(value, log_probs_N) for value in (ours, theirs))
    assert_same(grad_N, their_grad_N)


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("vanilla", PpoLoss()),
        ("vanilla", PpoLoss(clip_low=0.2, clip_high=0.28, dual_clip=3.0)),
        ("vanilla", PpoLoss(clip_low=0.1, clip_high=0.4, dual_clip=1.2)),
        ("gspo", GspoLoss()),
        ("gspo", GspoLoss(clip_low=0.2, clip_high=0.3)),
        ("cispo", CispoLoss()),
        ("cispo", CispoLoss(clip_low=0.2, clip_high=0.2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("old_policy", [OldPolicy.GIVEN, OldPolicy.ROLLOUT])
def test_ratio_losses(name: str, loss, old_policy: OldPolicy) -> None:
    for seed, aggregation in zip(SEEDS, itertools.cycle(MODES), strict=False):
        config = _config(loss, aggregation, old_policy=old_policy, correction=UNCORRECTED)
        case = padded(seed)
        log_probs_ST = case.log_probs_ST.clone().requires_grad_()
        old_ST = case.old_log_probs_ST if old_policy is OldPolicy.GIVEN else case.rollout_log_probs_ST
        theirs, metrics = core_algos.get_policy_loss_fn(name)(
            old_ST, log_probs_ST, case.advantages_ST, case.mask_ST, MODES[aggregation], _actor(loss)
        )
        log_probs_N = case.flat(log_probs_ST)
        batch = loss_batch(case, config)
        ours = policy_loss(config, log_probs_N=log_probs_N, entropy_N=torch.zeros_like(log_probs_N), batch=batch)
        _assert_equal(ours.loss, theirs, log_probs_ST)
        assert ours.metrics["clip_fraction"].value.item() == pytest.approx(metrics["actor/pg_clipfrac"], rel=1e-5)


@pytest.mark.parametrize("loss", [SapoLoss(), SapoLoss(temperature_positive=0.5, temperature_negative=4.0)], ids=str)
def test_sapo(loss: SapoLoss) -> None:
    """verl has only one aggregation for it."""
    actor = dataclasses.replace(_actor(PpoLoss()), tau_pos=loss.temperature_positive, tau_neg=loss.temperature_negative)
    config = _config(loss, Aggregation.SEQUENCE_MEAN_TOKEN_MEAN, old_policy=OldPolicy.GIVEN, correction=UNCORRECTED)
    for seed in SEEDS:
        case = padded(seed)
        log_probs_ST = case.log_probs_ST.clone().requires_grad_()
        theirs, _ = core_algos.compute_policy_loss_sapo(
            case.old_log_probs_ST, log_probs_ST, case.advantages_ST, case.mask_ST, config=actor
        )
        log_probs_N = case.flat(log_probs_ST)
        batch = loss_batch(case, config)
        ours = policy_loss(config, log_probs_N=log_probs_N, entropy_N=torch.zeros_like(log_probs_N), batch=batch)
        _assert_equal(ours.loss, theirs, log_probs_ST)


def test_policy_gradient() -> None:
    for seed, aggregation in zip(SEEDS, itertools.cycle(MODES), strict=False):
        config = _config(PolicyGradientLoss(), aggregation, correction=UNCORRECTED)
        case = padded(seed)
        log_probs_ST = case.log_probs_ST.clone().requires_grad_()
        theirs, _ = core_algos.compute_policy_loss_reinforce(
            case.rollout_log_probs_ST, log_probs_ST, case.advantages_ST, case.mask_ST, MODES[aggregation], _actor(PpoLoss())
        )
        log_probs_N = case.flat(log_probs_ST)
        batch = loss_batch(case, config)
        ours = policy_loss(config, log_probs_N=log_probs_N, entropy_N=torch.zeros_like(log_probs_N), batch=batch)
        _assert_equal(ours.loss, theirs, log_probs_ST)


@pytest.mark.parametrize("estimator", KlEstimator)
def test_kl_estimators(estimator: KlEstimator) -> None:
    for seed in SEEDS:
        case = padded(seed, spreads=SMALL_GAPS)
        log_probs_ST = case.log_probs_ST.clone().requires_grad_()
        theirs_ST = core_algos.kl_penalty(log_probs_ST, case.ref_log_probs_ST, ESTIMATORS[estimator])
        ours_ST = kl_divergence(log_probs_ST, ref_log_probs_N=case.ref_log_probs_ST, estimator=estimator)
        assert theirs_ST.max() < 10.0, "verl cuts k3 off at 10"
        _assert_equal(ours_ST.sum(), theirs_ST.sum(), log_probs_ST)
        assert_same(ours_ST, theirs_ST)


@pytest.mark.parametrize("clip", [0.2, 1.0])
def test_value_loss(clip: float) -> None:
    their_loss = functools.partial(core_algos.compute_value_loss, cliprange_value=clip, loss_scale_factor=LENGTH)
    for seed, aggregation in zip(SEEDS, itertools.cycle(MODES), strict=False):
        config = _config(ValueLoss(clip=clip), aggregation)
        case = padded(seed)
        predicted_ST = case.log_probs_ST.clone().requires_grad_()
        theirs, clip_fraction = their_loss(
            predicted_ST, case.rewards_ST, case.values_ST, case.mask_ST, loss_agg_mode=MODES[aggregation]
        )
        ours = value_loss(config, values_N=case.flat(predicted_ST), batch=loss_batch(case, config))
        _assert_equal(ours.loss, theirs, predicted_ST)
        assert ours.metrics["clip_fraction"].value.item() == pytest.approx(clip_fraction.item(), rel=1e-5)
