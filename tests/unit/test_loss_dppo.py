"""DPPO against the paper's formula in plain Python, and its ranges."""

import math

import pytest
import torch

from tasuki.algorithms.loss_types import Correction, LossConfig, OldPolicy
from tasuki.algorithms.losses.dppo import DppoLoss
from tasuki.algorithms.objective import policy_loss
from tests.unit.loss_batches import random_case


def _token(loss: DppoLoss, *, log_prob: float, old: float, advantage: float) -> tuple[float, float]:
    """Loss of a token and its derivative with respect to the token's log-prob."""
    p, q = math.exp(log_prob), math.exp(old)
    if loss.divergence == "tv":
        divergence, threshold = abs(p - q), 0.15
    else:
        divergence, threshold = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)), 0.05
    if divergence > (threshold if loss.threshold is None else loss.threshold) and (p - q) * advantage > 0:
        return 0.0, 0.0
    weight = min(p / q, loss.max_ratio)
    return -weight * advantage * log_prob, -weight * advantage


@pytest.mark.parametrize("old_policy", [OldPolicy.GIVEN, OldPolicy.ROLLOUT])
@pytest.mark.parametrize(
    "loss", [DppoLoss(), DppoLoss(divergence="kl"), DppoLoss(threshold=0.02), DppoLoss(divergence="kl", max_ratio=1.1)], ids=str
)
@pytest.mark.parametrize("seed", range(8))
def test_loss_and_gradient_are_the_papers(loss: DppoLoss, old_policy: OldPolicy, seed: int) -> None:
    config = LossConfig(loss=loss, old_policy=old_policy, correction=Correction(token_truncation=None))
    case = random_case(config, seed=seed)
    # The gap to an old policy may make its log-prob positive.
    old_N = (case.batch.old_log_probs_N if old_policy is OldPolicy.GIVEN else case.batch.rollout_log_probs_N).clamp_(max=-1e-3)
    result = policy_loss(config, log_probs_N=case.log_probs_N, entropy_N=case.entropy_N, batch=case.batch)
    (grad_N,) = torch.autograd.grad(result.loss, case.log_probs_N)
    columns = (case.log_probs_N, old_N, case.batch.advantages_N, case.batch.weights_N)
    rows = [
        [weight * each for each in _token(loss, log_prob=log_prob, old=old, advantage=advantage)]
        for log_prob, old, advantage, weight in zip(*(column.tolist() for column in columns), strict=True)
    ]
    assert result.loss.item() == pytest.approx(sum(value for value, _ in rows), rel=1e-6)
    assert grad_N.tolist() == pytest.approx([slope for _, slope in rows], rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_a_probability_of_one_has_a_finite_divergence(divergence: str) -> None:
    config = LossConfig.read("dppo", {"divergence": divergence, "old_policy": "given", "correction": {}})
    case = random_case(config, dtype=torch.float32)
    case.batch.old_log_probs_N.zero_()
    result = policy_loss(config, log_probs_N=case.log_probs_N, entropy_N=case.entropy_N, batch=case.batch)
    assert torch.isfinite(result.loss) and torch.isfinite(result.metrics["divergence"].value)
