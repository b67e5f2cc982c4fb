"""Policy losses per token, before aggregation. Shape suffixes: N tokens, S samples.

`log_ratio_N` is log(policy / old policy) of each token, with gradient; all tensors [N] are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tasuki.algorithms.batch import LossBatch, Metric, max_metric, mean_metric, sample_sums, to_tokens
from tasuki.algorithms.kl import MAX_LOG_RATIO
from tasuki.algorithms.loss_types import CispoLoss, GspoLoss, Loss, PpoLoss, SapoLoss


@dataclass(frozen=True, slots=True, eq=False)
class Surrogate:
    """A ratio-based loss of each token, to be minimized, and the effect of its clip."""

    loss_N: Tensor
    ratio_N: Tensor
    """The unclipped ratio."""
    clipped_low_N: Tensor
    """bool: whether the ratio's lower bound applied."""
    clipped_high_N: Tensor
    """bool: whether the ratio's upper bound applied."""
    dual_clipped_N: Tensor | None = None
    """bool: whether the dual clip applied; None without one."""

    def metrics(self, loss_mask_N: Tensor) -> dict[str, Metric]:
        metrics = {
            "ratio": mean_metric(self.ratio_N, loss_mask_N),
            "ratio_max": max_metric(self.ratio_N, loss_mask_N),
            "clip_fraction": mean_metric(self.clipped_low_N | self.clipped_high_N, loss_mask_N),
            "clip_fraction_low": mean_metric(self.clipped_low_N, loss_mask_N),
            "clip_fraction_high": mean_metric(self.clipped_high_N, loss_mask_N),
        }
        if self.dual_clipped_N is not None:
            metrics["dual_clip_fraction"] = mean_metric(self.dual_clipped_N, loss_mask_N)
        return metrics


def surrogate(loss: Loss, *, log_probs_N: Tensor, log_ratio_N: Tensor, batch: LossBatch) -> Surrogate:
    """The surrogate of a loss with a ratio."""
    assert batch.advantages_N is not None
    match loss:
        case PpoLoss():
            return ppo(loss, log_ratio_N=log_ratio_N, advantages_N=batch.advantages_N)
        case GspoLoss():
            return gspo(loss, log_probs_N=log_probs_N, log_ratio_N=log_ratio_N, advantages_N=batch.advantages_N, batch=batch)
        case CispoLoss():
            return cispo(loss, log_probs_N=log_probs_N, log_ratio_N=log_ratio_N, advantages_N=batch.advantages_N)
        case SapoLoss():
            return sapo(loss, log_ratio_N=log_ratio_N, advantages_N=batch.advantages_N)
        case _:
            raise AssertionError(f"{type(loss).__name__} has no ratio")


def ppo(loss: PpoLoss, *, log_ratio_N: Tensor, advantages_N: Tensor) -> Surrogate:
    """PPO's pessimistic bound: the larger of each token's clipped and unclipped loss.

    Source: PPO (arXiv:1707.06347) eq. 7; two bounds: DAPO (arXiv:2503.14476) eq. 10; dual clip: arXiv:1912.09729.
    """
    surrogate = _clipped(log_ratio_N.exp(), advantages_N, clip_low=loss.clip_low, clip_high=loss.clip_high)
    if loss.dual_clip is None:
        return surrogate
    bound_N = -advantages_N * loss.dual_clip
    dual_clipped_N = (advantages_N < 0.0) & (surrogate.loss_N > bound_N)
    return Surrogate(
        loss_N=torch.where(dual_clipped_N, bound_N, surrogate.loss_N),
        ratio_N=surrogate.ratio_N,
        clipped_low_N=surrogate.clipped_low_N,
        clipped_high_N=surrogate.clipped_high_N,
        dual_clipped_N=dual_clipped_N,
    )


def gspo(loss: GspoLoss, *, log_probs_N: Tensor, log_ratio_N: Tensor, advantages_N: Tensor, batch: LossBatch) -> Surrogate:
    """GSPO in its token form: every token of a sequence has the ratio s = exp(mean of log_ratio over the counted tokens).

    Each token's own log-prob carries the gradient, s * grad(log_prob). With SEQUENCE_MEAN_TOKEN_MEAN, the paper's aggregation, the
    gradient equals that of the sequence form.
    Source: GSPO (arXiv:2507.18071) eq. 5 and 7 (sequence form), eq. 13 and 14 (token form).
    """
    counted_S = sample_sums(batch.loss_mask_N, batch.cu_seqlens_S).clamp(min=1.0)
    counted_log_ratio_N = torch.where(batch.loss_mask_N != 0.0, log_ratio_N.detach() * batch.loss_mask_N, 0.0)
    mean_S = (sample_sums(counted_log_ratio_N, batch.cu_seqlens_S) / counted_S).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    mean_N = to_tokens(mean_S, batch.cu_seqlens_S, num_tokens=len(log_ratio_N)).to(log_ratio_N.dtype)
    ratio_N = (mean_N + (log_probs_N - log_probs_N.detach())).exp()
    return _clipped(ratio_N, advantages_N, clip_low=loss.clip_low, clip_high=loss.clip_high)


def cispo(loss: CispoLoss, *, log_probs_N: Tensor, log_ratio_N: Tensor, advantages_N: Tensor) -> Surrogate:
    """CISPO: -clip(ratio) * advantage * log_prob, where the clipped ratio is a constant.

    Source: CISPO, MiniMax-M1 (arXiv:2506.13585) eq. 4 and 5.
    """
    ratio_N = log_ratio_N.detach().exp()
    weights_N = ratio_N.clamp(1.0 - loss.clip_low, 1.0 + loss.clip_high)
    return Surrogate(
        loss_N=-weights_N * advantages_N * log_probs_N,
        ratio_N=ratio_N,
        clipped_low_N=ratio_N < 1.0 - loss.clip_low,
        clipped_high_N=ratio_N > 1.0 + loss.clip_high,
    )


def sapo(loss: SapoLoss, *, log_ratio_N: Tensor, advantages_N: Tensor) -> Surrogate:
    """SAPO: -advantage * sigmoid(t * (ratio - 1)) * 4 / t, whose slope at ratio 1 is that of the unclipped loss. It never clips.

    Source: Soft Adaptive Policy Optimization (arXiv:2511.20347).
    """
    ratio_N = log_ratio_N.exp()
    is_positive_N = advantages_N > 0.0
    temperature_N = torch.full_like(ratio_N, loss.temperature_negative).masked_fill(is_positive_N, loss.temperature_positive)
    soft_N = torch.sigmoid(temperature_N * (ratio_N - 1.0)) * (4.0 / temperature_N)
    never_N = torch.zeros_like(advantages_N, dtype=torch.bool)
    return Surrogate(loss_N=-advantages_N * soft_N, ratio_N=ratio_N.detach(), clipped_low_N=never_N, clipped_high_N=never_N)


def policy_gradient(*, log_probs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """[N]: REINFORCE's loss of each token, whose gradient is the policy gradient.

    Source: Williams (1992), "Simple statistical gradient-following algorithms", eq. 11.
    """
    return -advantages_N * log_probs_N


def _clipped(ratio_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float) -> Surrogate:
    unclipped_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    is_clipped_N = clipped_N > unclipped_N
    return Surrogate(
        loss_N=torch.maximum(unclipped_N, clipped_N),
        ratio_N=ratio_N,
        clipped_low_N=is_clipped_N & (advantages_N < 0.0),
        clipped_high_N=is_clipped_N & (advantages_N > 0.0),
    )
