"""Policy losses: from log-probabilities and advantages to sums over tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# exp(20) is far outside any clip range; beyond it float32 overflows and the gradient becomes NaN.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class PolicyLossSums:
    """Sums over counted tokens, each []. Whoever knows the global number of counted tokens divides by it."""

    loss: Tensor
    """The loss, with its gradient."""
    num_clipped: Tensor
    ref_kl: Tensor


def policy_loss_sums(
    log_probs_T: Tensor,
    *,
    rollout_log_probs_T: Tensor,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    clip_low: float,
    clip_high: float,
    ref_log_probs_T: Tensor | None = None,
    kl_coef: float = 0.0,
) -> PolicyLossSums:
    """PPO's clipped loss, plus `kl_coef` times the KL divergence to the reference, summed over the tokens that the mask counts.

    All tensors: [T] float32, one entry for each completion token of a micro-batch; the mask holds 0 and 1.
    A sum over tokens, to be divided by the number of tokens of the whole batch, is DAPO's token mean (arXiv:2503.14476 sec. 3.3).
    """
    loss_T, is_clipped_T = ppo_clip(
        log_probs_T,
        rollout_log_probs_T=rollout_log_probs_T,
        advantages_T=advantages_T,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    ref_kl_T = torch.zeros_like(loss_T) if ref_log_probs_T is None else k3_kl(log_probs_T, ref_log_probs_T=ref_log_probs_T)
    if kl_coef != 0.0:
        loss_T = loss_T + kl_coef * ref_kl_T
    return PolicyLossSums(
        loss=torch.dot(loss_T, loss_mask_T),
        num_clipped=torch.dot(is_clipped_T.to(loss_mask_T.dtype), loss_mask_T),
        ref_kl=torch.dot(ref_kl_T.detach(), loss_mask_T),
    )


def ppo_clip(
    log_probs_T: Tensor, *, rollout_log_probs_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate for each token, and whether the clip decided it.

    All tensors: [T] float32. Returns the loss (to be minimized) [T] and a bool tensor [T].
    Source: PPO (arXiv:1707.06347) eq. 7; separate bounds 1 - clip_low and 1 + clip_high as in DAPO (arXiv:2503.14476) sec. 3.1.
    """
    log_ratio_T = (log_probs_T - rollout_log_probs_T).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio_T = log_ratio_T.exp()
    unclipped_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(unclipped_T, clipped_T), clipped_T > unclipped_T


def k3_kl(log_probs_T: Tensor, *, ref_log_probs_T: Tensor) -> Tensor:
    """The k3 estimate of KL(policy || reference) for each token: never negative, unbiased for samples of the policy.

    Both: [T] float32, of the same tokens. Returns [T].
    Source: Schulman, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html); GRPO (arXiv:2402.03300) eq. 4.
    """
    log_ratio_T = (ref_log_probs_T - log_probs_T).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return log_ratio_T.exp() - log_ratio_T - 1.0
