"""Losses, their gradients and advantages against TRL's trainers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from padded_cases import SEEDS, Padded, assert_same, loss_batch, padded
from trl_trainers import GROUP_SIZE, MAX_COMPLETION_TOKENS, grpo_trainer, rloo_trainer
from trl_trainers import advantages as their_advantages
from trl_trainers import loss as their_loss

from tasuki.algorithms import advantages
from tasuki.algorithms.loss_types import Aggregation, Correction, LossConfig, OldPolicy
from tasuki.algorithms.losses.cispo import CispoLoss
from tasuki.algorithms.losses.gspo import GspoLoss
from tasuki.algorithms.losses.ppo import PpoLoss
from tasuki.algorithms.losses.sapo import SapoLoss
from tasuki.algorithms.objective import policy_loss

UNCORRECTED = Correction(token_truncation=None)
PPO = PpoLoss(clip_low=0.2, clip_high=0.28)
BOTH = {"epsilon": 0.2, "epsilon_high": 0.28}
# In TRL, epsilon_high bounds CISPO's ratio itself, not its distance from 1.
CISPO = (CispoLoss(clip_high=4.0), Aggregation.TOKEN_MEAN, {"loss_type": "cispo", "epsilon_high": 5.0})
LOSSES = [
    (PPO, Aggregation.TOKEN_MEAN, {"loss_type": "dapo", **BOTH}),
    (PPO, Aggregation.TOKEN_MEAN, {"loss_type": "bnpo", **BOTH}),
    (PPO, Aggregation.SEQUENCE_MEAN_TOKEN_MEAN, {"loss_type": "grpo", **BOTH}),
    (PPO, Aggregation.CONSTANT, {"loss_type": "dr_grpo", **BOTH}),
    (
        GspoLoss(clip_low=0.1, clip_high=0.2),
        Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.2},
    ),
    CISPO,
    (
        SapoLoss(temperature_positive=0.5, temperature_negative=4.0),
        Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
        {"loss_type": "sapo", "sapo_temperature_pos": 0.5, "sapo_temperature_neg": 4.0},
    ),
]


def _config(loss, aggregation: Aggregation, **settings) -> LossConfig:
    length = MAX_COMPLETION_TOKENS if aggregation is Aggregation.CONSTANT else None
    return LossConfig(loss=loss, aggregation=aggregation, aggregation_length=length, **{"correction": UNCORRECTED, **settings})


def _inputs(case: Padded, config: LossConfig) -> dict[str, torch.Tensor]:
    inputs = {"completion_mask": case.mask_ST, "advantages": case.advantages_ST[:, 0]}
    if config.old_policy is not OldPolicy.CURRENT:
        inputs["old_per_token_logps"] = case.old_log_probs_ST
    return inputs


def _assert_equal(trainer, config: LossConfig, case: Padded, **more: torch.Tensor) -> None:
    log_probs_ST = case.log_probs_ST.clone().requires_grad_()
    entropy_ST = case.values_ST.abs().requires_grad_()
    theirs = their_loss(trainer, log_probs_ST=log_probs_ST, entropy_ST=entropy_ST, inputs={**_inputs(case, config), **more})
    batch = loss_batch(case, config)
    ours = policy_loss(config, log_probs_N=case.flat(log_probs_ST), entropy_N=case.flat(entropy_ST), batch=batch).loss
    assert_same(ours, theirs)
    wanted = (log_probs_ST, entropy_ST) if config.entropy_coef else (log_probs_ST,)
    grads, their_grads = (torch.autograd.grad(value, wanted) for value in (ours, theirs))
    for grad, their_grad in zip(grads, their_grads, strict=True):
        assert_same(grad, their_grad)


@pytest.mark.parametrize(("loss", "aggregation", "settings"), LOSSES, ids=str)
@pytest.mark.parametrize("old_policy", [OldPolicy.GIVEN, OldPolicy.CURRENT])
def test_losses(loss, aggregation: Aggregation, settings: dict, old_policy: OldPolicy) -> None:
    trainer, config = grpo_trainer(**settings), _config(loss, aggregation, old_policy=old_policy)
    for seed in SEEDS:
        _assert_equal(trainer, config, padded(seed, sequence_advantages=True))


@pytest.mark.parametrize(("loss", "aggregation", "settings"), LOSSES, ids=str)
def test_losses_with_kl_to_the_reference(loss, aggregation: Aggregation, settings: dict) -> None:
    """TRL's default of weighting each token's KL divergence by the ratio (use_bias_correction_kl) is switched off."""
    trainer, config = grpo_trainer(**settings), _config(loss, aggregation, old_policy=OldPolicy.GIVEN, kl_coef=0.1)
    trainer.beta, trainer.args.use_bias_correction_kl = 0.1, False
    for seed in SEEDS:
        case = padded(seed, sequence_advantages=True)
        _assert_equal(trainer, config, case, ref_per_token_logps=case.ref_log_probs_ST)


def test_entropy_bonus() -> None:
    """TRL's bonus is a mean over tokens for every loss, which equals ours with the token mean."""
    trainer = grpo_trainer(loss_type="dapo", entropy_coef=0.05, **BOTH)
    config = _config(PPO, Aggregation.TOKEN_MEAN, old_policy=OldPolicy.GIVEN, entropy_coef=0.05)
    for seed in SEEDS:
        _assert_equal(trainer, config, padded(seed, sequence_advantages=True))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_weights(level: str) -> None:
    """The factor is an input of TRL; the test compares its effect on the loss."""
    trainer = grpo_trainer(loss_type="dapo", **BOTH)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    is_token = level == "token"
    correction = Correction(token_truncation=2.0) if is_token else Correction(token_truncation=None, sequence_truncation=2.0)
    config = _config(PPO, Aggregation.TOKEN_MEAN, old_policy=OldPolicy.GIVEN, correction=correction, kl_coef=0.1)
    trainer.beta, trainer.args.use_bias_correction_kl = 0.1, False
    for seed in SEEDS:
        case = padded(seed, sequence_advantages=True)
        gap_ST = (case.old_log_probs_ST - case.rollout_log_probs_ST) * case.mask_ST
        ratio_ST = (gap_ST if is_token else gap_ST.sum(-1, keepdim=True)).exp().clamp(max=2.0)
        _assert_equal(trainer, config, case, ref_per_token_logps=case.ref_log_probs_ST, importance_sampling_ratio=ratio_ST)


def _rewards(seed: int) -> torch.Tensor:
    """Makes rewards [P, G] in float64, with occasional NaN."""
    generator = np.random.default_rng(seed)
    rewards_PG = generator.normal(size=(int(generator.integers(1, 5)), GROUP_SIZE))
    rewards_PG[generator.random(rewards_PG.shape) < 0.1] = np.nan
    return torch.tensor(rewards_PG)


@pytest.mark.parametrize("std", ["sample", "none"])
def test_group_mean(std: advantages.Std) -> None:
    """TRL divides by the deviation plus 1e-4, tasuki by the deviation plus 1e-6."""
    trainer = grpo_trainer(scale_rewards="none" if std == "none" else "group")
    for seed in SEEDS:
        rewards_PG = _rewards(seed)
        theirs_PG = their_advantages(trainer, rewards_PG.reshape(-1)).reshape(rewards_PG.shape)
        if std == "sample":
            std_P1 = np.nanstd(rewards_PG.numpy(), axis=1, ddof=1, keepdims=True)
            theirs_PG = theirs_PG * torch.tensor(np.nan_to_num((std_P1 + 1e-4) / (std_P1 + 1e-6)))
        assert_same(torch.tensor(advantages.group_mean(rewards_PG.numpy(), std=std)), theirs_PG, atol=1e-7)


def test_leave_one_out() -> None:
    trainer = rloo_trainer(beta=0.0)
    for seed in SEEDS:
        rewards_PG = _rewards(seed)
        theirs_PG = their_advantages(trainer, rewards_PG.reshape(-1)).reshape(rewards_PG.shape)
        assert_same(torch.tensor(advantages.leave_one_out(rewards_PG.numpy())), theirs_PG, atol=1e-7)
