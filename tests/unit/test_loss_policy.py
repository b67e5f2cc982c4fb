"""Policy losses and their gradients against the papers' formulas, token by token in plain Python."""

import math

import pytest
import torch

from tasuki.algorithms.loss import Loss
from tasuki.algorithms.loss_types import Aggregation, Correction, KlEstimator, LossConfig, OldPolicy
from tasuki.algorithms.losses.cispo import CispoLoss
from tasuki.algorithms.losses.gspo import GspoLoss
from tasuki.algorithms.losses.policy_gradient import PolicyGradientLoss
from tasuki.algorithms.losses.ppo import PpoLoss
from tasuki.algorithms.losses.sapo import SapoLoss
from tasuki.algorithms.losses.sft import SftLoss
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.algorithms.objective import kl_divergence, policy_loss
from tests.unit.every_loss import EXAMPLES, has_ratio
from tests.unit.loss_batches import Case, random_case

UNCORRECTED = Correction(token_truncation=None)
LOSSES = [loss for loss in EXAMPLES if not isinstance(loss, ValueLoss)]


def _token(loss: Loss, *, log_prob: float, ratio: float, advantage: float) -> tuple[float, float]:
    """Loss of a token and its derivative with respect to the token's log-prob."""
    match loss:
        case PpoLoss() | GspoLoss():
            clipped = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
            surrogate = min(ratio * advantage, clipped * advantage)
            gradient = ratio * advantage if ratio * advantage <= clipped * advantage else 0.0
            if (
                isinstance(loss, PpoLoss)
                and loss.dual_clip is not None
                and advantage < 0
                and surrogate < loss.dual_clip * advantage
            ):
                surrogate, gradient = loss.dual_clip * advantage, 0.0
            return -surrogate, -gradient
        case CispoLoss():
            weight = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
            return -weight * advantage * log_prob, -weight * advantage
        case SapoLoss():
            temperature = loss.temperature_positive if advantage > 0 else loss.temperature_negative
            sigmoid = 1 / (1 + math.exp(-temperature * (ratio - 1)))
            return -advantage * sigmoid * 4 / temperature, -advantage * 4 * sigmoid * (1 - sigmoid) * ratio
        case PolicyGradientLoss():
            return -advantage * log_prob, -advantage
        case SftLoss():
            return -log_prob, -1.0
        case _:
            raise AssertionError(f"{type(loss).__name__} has no definition here")


def _reference(config: LossConfig, case: Case) -> tuple[float, list[float]]:
    """Loss and gradient by definition, without correction, KL and entropy."""
    log_probs, batch = case.log_probs_N.tolist(), case.batch
    old = {
        OldPolicy.CURRENT: log_probs,
        OldPolicy.GIVEN: batch.old_log_probs_N.tolist(),
        OldPolicy.ROLLOUT: batch.rollout_log_probs_N.tolist(),
    }[config.old_policy]
    weights, mask, advantages = batch.weights_N.tolist(), batch.loss_mask_N.tolist(), batch.advantages_N.tolist()
    total, gradient = 0.0, [0.0] * len(log_probs)
    for span in case.spans:
        counted = [t for t in span if mask[t]]
        for t in counted:
            log_ratio = log_probs[t] - old[t]
            if isinstance(config.loss, GspoLoss):
                log_ratio = sum(log_probs[u] - old[u] for u in counted) / len(counted)
            value, derivative = _token(config.loss, log_prob=log_probs[t], ratio=math.exp(log_ratio), advantage=advantages[t])
            total += weights[t] * value
            gradient[t] += weights[t] * derivative
    return total, gradient


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("old_policy", OldPolicy)
@pytest.mark.parametrize("seed", range(8))
def test_loss_and_gradient_are_the_papers(loss: Loss, old_policy: OldPolicy, seed: int) -> None:
    if not has_ratio(loss):
        old_policy = OldPolicy.CURRENT
    config = LossConfig(
        loss=loss, old_policy=old_policy, correction=UNCORRECTED, aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN
    )
    case = random_case(config, seed=seed)
    result = policy_loss(config, log_probs_N=case.log_probs_N, entropy_N=case.entropy_N, batch=case.batch).loss
    (grad_N,) = torch.autograd.grad(result, case.log_probs_N)
    expected, expected_gradient = _reference(config, case)
    assert result.item() == pytest.approx(expected, rel=1e-6)
    assert grad_N.tolist() == pytest.approx(expected_gradient, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_gspos_token_form_has_the_gradient_of_the_sequence_form(seed: int) -> None:
    loss = GspoLoss(clip_low=0.1, clip_high=0.1)
    config = LossConfig(
        loss=loss, old_policy=OldPolicy.GIVEN, correction=UNCORRECTED, aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN
    )
    case = random_case(config, seed=seed)
    advantages_N = case.batch.advantages_N
    for span in case.spans:  # the sequence form needs one advantage per sequence
        advantages_N[list(span)] = advantages_N[span.start].item() if len(span) else 0.0
    result = policy_loss(config, log_probs_N=case.log_probs_N, entropy_N=case.entropy_N, batch=case.batch).loss
    losses = []
    for span in case.spans:
        counted = [t for t in span if case.batch.loss_mask_N[t]]
        if counted:
            ratio = (case.log_probs_N[counted] - case.batch.old_log_probs_N[counted]).mean().exp()
            advantage = advantages_N[counted[0]]
            losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage))
    expected = torch.stack(losses).mean()
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-9)
    (grad_N,), (expected_grad_N,) = (torch.autograd.grad(value, case.log_probs_N) for value in (result, expected))
    torch.testing.assert_close(grad_N, expected_grad_N, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("estimator", KlEstimator)
def test_kl_estimators_and_their_gradients(estimator: KlEstimator) -> None:
    log_probs_N = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    ref_log_probs_N = torch.tensor([-1.5, -1.9, -3.0], dtype=torch.float64)
    kl_N = kl_divergence(log_probs_N, ref_log_probs_N=ref_log_probs_N, estimator=estimator)
    (grad_N,) = torch.autograd.grad(kl_N.sum(), log_probs_N)
    for kl, grad, log_prob, ref in zip(*(x.tolist() for x in (kl_N, grad_N, log_probs_N, ref_log_probs_N)), strict=True):
        d = log_prob - ref
        value = {"k1": d, "k2": d * d / 2}.get(estimator, math.exp(-d) + d - 1)
        slope = {"k1": 1.0, "k3": 1 - math.exp(-d)}.get(estimator, d)
        assert (kl, grad) == (pytest.approx(value, rel=1e-9), pytest.approx(slope, rel=1e-9))


@pytest.mark.parametrize("estimator", [KlEstimator.K3, KlEstimator.K3_STRAIGHT_THROUGH])
def test_k3_of_close_policies_does_not_cancel(estimator: KlEstimator) -> None:
    exact_N = torch.logspace(-6, 0, 60, dtype=torch.float64).requires_grad_()
    d_N = exact_N.detach().float().requires_grad_()
    for sign in (1.0, -1.0):
        kl_N = kl_divergence(torch.zeros_like(d_N), ref_log_probs_N=sign * d_N, estimator=estimator)
        expected_N = torch.special.expm1(sign * exact_N) - sign * exact_N
        is_far_N = exact_N > 1e-3
        torch.testing.assert_close(kl_N[is_far_N].double(), expected_N[is_far_N], rtol=1e-4, atol=0)
        torch.testing.assert_close(kl_N.double(), exact_N.square() / 2, rtol=0.5, atol=0)


def test_straight_through_has_the_gradient_of_the_kl_divergence_in_expectation() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(7, dtype=torch.float64, generator=generator).requires_grad_()
    ref_V = torch.log_softmax(torch.randn(7, dtype=torch.float64, generator=generator), -1)
    log_probs_V = torch.log_softmax(logits_V, -1)
    probs_V = log_probs_V.exp()
    (exact,) = torch.autograd.grad((probs_V * (log_probs_V - ref_V)).sum(), logits_V, retain_graph=True)
    kl_V = kl_divergence(log_probs_V, ref_log_probs_N=ref_V, estimator=KlEstimator.K3_STRAIGHT_THROUGH)
    (estimated,) = torch.autograd.grad((probs_V.detach() * kl_V).sum(), logits_V)
    torch.testing.assert_close(estimated, exact)


@pytest.mark.parametrize("loss", [PpoLoss(), PolicyGradientLoss(), SftLoss()], ids=str)
def test_kl_and_entropy_are_added_with_their_coefficients(loss: Loss) -> None:
    plain = LossConfig(loss=loss, correction=UNCORRECTED)
    full = LossConfig(loss=loss, correction=UNCORRECTED, kl_coef=0.3, kl_estimator=KlEstimator.K2, entropy_coef=0.1)
    case = random_case(full)
    terms = [
        policy_loss(config, log_probs_N=case.log_probs_N, entropy_N=case.entropy_N, batch=case.batch)
        for config in (plain, full)
    ]
    batch = case.batch
    kl = ((case.log_probs_N - batch.ref_log_probs_N).square() / 2 * batch.weights_N).sum()
    entropy = (case.entropy_N * batch.weights_N).sum()
    torch.testing.assert_close(terms[1].loss, terms[0].loss + 0.3 * kl - 0.1 * entropy)
    (grad_N,) = torch.autograd.grad(terms[1].loss, case.entropy_N)
    torch.testing.assert_close(grad_N, -0.1 * batch.weights_N)
    assert "ref_kl" in terms[0].metrics, "reported without a coefficient too"
