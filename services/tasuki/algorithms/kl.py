"""Estimators of KL(policy || reference) for tokens sampled from the policy. Shape suffix: N tokens."""

from __future__ import annotations

from torch import Tensor

from tasuki.algorithms.loss import MAX_LOG_RATIO
from tasuki.algorithms.loss_types import KlEstimator


def log_ratio(log_probs_N: Tensor, other_log_probs_N: Tensor) -> Tensor:
    """[N]: log of the ratio of two probabilities, clamped to [-20, 20]."""
    return (log_probs_N - other_log_probs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_divergence(log_probs_N: Tensor, *, ref_log_probs_N: Tensor, estimator: KlEstimator) -> Tensor:
    """[N]: estimate of KL(policy || reference) for each token, with gradient with respect to `log_probs_N`.

    With r = reference / policy: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r. k1 and k3 are unbiased in value; in expectation only
    k2 has the gradient of the KL divergence, which k3_straight_through uses.
    Source: Schulman (http://joschu.net/blog/kl-approx.html); k3 as in GRPO (arXiv:2402.03300) eq. 4; gradients: arXiv:2506.09477.
    """
    log_r_N = log_ratio(ref_log_probs_N, log_probs_N)
    match estimator:
        case KlEstimator.K1:
            return -log_r_N
        case KlEstimator.K2:
            return 0.5 * log_r_N.square()
        case KlEstimator.K3:
            return log_r_N.exp() - log_r_N - 1.0
        case KlEstimator.K3_STRAIGHT_THROUGH:
            k2_N = 0.5 * log_r_N.square()
            return (log_r_N.exp() - log_r_N - 1.0).detach() + (k2_N - k2_N.detach())
