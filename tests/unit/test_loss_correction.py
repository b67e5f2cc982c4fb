"""Correction of the rollout's probabilities: weights and masks against their definitions."""

import math

import pytest
import torch

from tasuki.algorithms.loss_types import Correction, LossConfig, OldPolicy
from tasuki.algorithms.losses.gspo import GspoLoss
from tasuki.algorithms.losses.policy_gradient import PolicyGradientLoss
from tasuki.algorithms.losses.sft import SftLoss
from tasuki.algorithms.objective import correction_weights, policy_loss
from tests.unit.loss_batches import Case, random_case

CORRECTIONS = [
    Correction(),
    Correction(token_truncation=1.1),
    Correction(token_truncation=None, sequence_truncation=1.5),
    Correction(token_truncation=None, token_mask=(0.7, 1.3)),
    Correction(token_mask=(0.7, 1.3)),
    Correction(token_truncation=None, geometric_mask=(0.9, 1.1)),
    Correction(token_truncation=None, sequence_truncation=1.2, token_mask=(0.5, 2.0), geometric_mask=(0.8, 1.25)),
]


def _reference(correction: Correction, log_ratios: list[float], counted: list[int]) -> dict[int, float]:
    """Weights of a sequence's counted tokens, by definition."""
    total = sum(log_ratios[t] for t in counted)
    weights = {}
    for t in counted:
        ratio, weight = math.exp(log_ratios[t]), 1.0
        if correction.token_truncation is not None:
            weight = min(ratio, correction.token_truncation)
        if correction.sequence_truncation is not None:
            weight = min(math.exp(total), correction.sequence_truncation)
        masks = [(ratio, correction.token_mask), (math.exp(total / len(counted)), correction.geometric_mask)]
        is_outside = any(bounds is not None and not bounds[0] <= value <= bounds[1] for value, bounds in masks)
        weights[t] = 0.0 if is_outside else weight
    return weights


def _loss(config: LossConfig, case: Case) -> torch.Tensor:
    return policy_loss(config, log_probs_N=case.log_probs_N, entropy_N=case.entropy_N, batch=case.batch).loss


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("old_policy", [OldPolicy.CURRENT, OldPolicy.GIVEN])
@pytest.mark.parametrize("seed", range(5))
def test_weights_are_the_truncated_and_masked_ratios(correction: Correction, old_policy: OldPolicy, seed: int) -> None:
    config = LossConfig(correction=correction, old_policy=old_policy)
    case = random_case(config, seed=seed)
    trainer_N = case.log_probs_N.detach() if old_policy is OldPolicy.CURRENT else case.batch.old_log_probs_N
    log_ratios = (trainer_N - case.batch.rollout_log_probs_N).tolist()
    result = correction_weights(config, log_probs_N=case.log_probs_N, batch=case.batch)
    assert not result.weights_N.requires_grad
    for span in case.spans:
        for t, weight in _reference(correction, log_ratios, [t for t in span if case.batch.loss_mask_N[t]]).items():
            assert result.weights_N[t].item() == pytest.approx(weight, rel=1e-6)
            assert result.masked_N[t].item() == (weight == 0.0)


@pytest.mark.parametrize("loss", [GspoLoss(), PolicyGradientLoss()], ids=str)
def test_the_policy_term_is_multiplied_and_the_kl_is_not(loss: GspoLoss | PolicyGradientLoss) -> None:
    config = LossConfig(loss=loss, kl_coef=0.5, correction=Correction(token_truncation=1.1, token_mask=(0.8, 1.25)))
    case = random_case(config)
    weights_N = correction_weights(config, log_probs_N=case.log_probs_N, batch=case.batch).weights_N
    plain = LossConfig(loss=loss, correction=Correction(token_truncation=None))
    only_kl = random_case(config)
    only_kl.batch.advantages_N.zero_()
    case.batch.advantages_N.mul_(weights_N)  # the policy term is linear in the advantages
    weighted = _loss(plain, case)
    case.batch.advantages_N.copy_(random_case(config).batch.advantages_N)
    torch.testing.assert_close(_loss(config, case), weighted + _loss(config, only_kl))


def test_against_the_rollout_itself_only_masks_apply() -> None:
    config = LossConfig(old_policy=OldPolicy.ROLLOUT)
    case = random_case(config)
    assert correction_weights(config, log_probs_N=case.log_probs_N, batch=case.batch) is None
    masking = LossConfig(old_policy=OldPolicy.ROLLOUT, correction=Correction(token_mask=(0.8, 1.25)))
    result = correction_weights(masking, log_probs_N=case.log_probs_N, batch=case.batch)
    assert set(result.weights_N.tolist()) == {0.0, 1.0}
    ratio_N = (case.log_probs_N.detach() - case.batch.rollout_log_probs_N).exp()
    is_outside_N = ((ratio_N < 0.8) | (ratio_N > 1.25)) & (case.batch.loss_mask_N > 0)
    assert torch.equal(result.masked_N, is_outside_N)


def test_supervised_losses_take_no_correction() -> None:
    config = LossConfig(loss=SftLoss())
    case = random_case(config)
    assert correction_weights(config, log_probs_N=case.log_probs_N, batch=case.batch) is None


def test_a_rejected_sequence_has_no_policy_gradient() -> None:
    config = LossConfig(correction=Correction(token_truncation=None, geometric_mask=(0.99, 1.01)))
    case = random_case(config, lengths=(4, 4))
    case.batch.rollout_log_probs_N[:4] = case.log_probs_N.detach()[:4]
    case.batch.rollout_log_probs_N[4:] = case.log_probs_N.detach()[4:] - 0.5
    (grad_N,) = torch.autograd.grad(_loss(config, case), case.log_probs_N)
    assert grad_N[:4].abs().sum() > 0
    assert (grad_N[4:] == 0).all()


def test_huge_gaps_stay_finite() -> None:
    for correction in CORRECTIONS:
        config = LossConfig(correction=correction)
        case = random_case(config, spread=500.0, dtype=torch.float32)
        loss = _loss(config, case)
        (grad_N,) = torch.autograd.grad(loss, case.log_probs_N)
        assert torch.isfinite(loss)
        assert torch.isfinite(grad_N).all()
