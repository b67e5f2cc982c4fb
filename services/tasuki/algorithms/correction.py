"""Correction of the mismatch between the policy that generated the samples and the policy that the loss assumes.

Rollout and trainer compute the same model with different kernels, so their probabilities differ. The ratio r of a token is the
trainer's probability divided by the rollout's. Shape suffixes: N tokens, S samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tasuki.algorithms.batch import LossBatch, Metric, mean_metric, sample_sums, to_tokens
from tasuki.algorithms.loss import MAX_LOG_RATIO
from tasuki.algorithms.loss_types import Correction, LossConfig, OldPolicy


@dataclass(frozen=True, slots=True, eq=False)
class CorrectionWeights:
    """Factors of each token's policy loss, without gradients."""

    weights_N: Tensor
    """Truncated importance weights; 0 where masked."""
    truncated_N: Tensor
    """bool: whether the truncation applied."""
    masked_N: Tensor
    """bool: whether the token is excluded."""

    def metrics(self, loss_mask_N: Tensor) -> dict[str, Metric]:
        return {
            "correction_weight": mean_metric(self.weights_N, loss_mask_N),
            "correction_truncated": mean_metric(self.truncated_N, loss_mask_N),
            "correction_masked": mean_metric(self.masked_N, loss_mask_N),
        }


def correction_weights(config: LossConfig, *, log_probs_N: Tensor, batch: LossBatch) -> CorrectionWeights | None:
    """Weights for the policy loss, or None if no correction is configured.

    r compares the rollout with the old policy: `old_log_probs_N` if given, else the current policy. With OldPolicy.ROLLOUT the loss's own
    ratio is the importance weight, so only the masks apply.
    """
    correction = config.correction
    if not config.has_advantages or not (config.truncates or correction.masks):
        return None
    trainer_log_probs_N = log_probs_N.detach()
    if config.old_policy is OldPolicy.GIVEN:
        assert batch.old_log_probs_N is not None
        trainer_log_probs_N = batch.old_log_probs_N
    assert batch.rollout_log_probs_N is not None
    counted_N = batch.loss_mask_N != 0.0
    log_r_N = torch.where(counted_N, trainer_log_probs_N - batch.rollout_log_probs_N, 0.0)
    weights_N, truncated_N = _truncated(correction, log_r_N, batch) if config.truncates else _ones(log_r_N)
    masked_N = _masked(correction, log_r_N, batch) & counted_N
    return CorrectionWeights(torch.where(masked_N, 0.0, weights_N), truncated_N, masked_N)


def _truncated(correction: Correction, log_r_N: Tensor, batch: LossBatch) -> tuple[Tensor, Tensor]:
    """Truncated importance weights [N], and which were truncated [N].

    Source: https://fengyao.notion.site/off-policy-rl (token), arXiv:2512.01374 compares the two; the cap is V-trace's
    (arXiv:1802.01561 eq. 1).
    """
    if correction.token_truncation is not None:
        bound, exponent_N = correction.token_truncation, log_r_N
    else:
        assert correction.sequence_truncation is not None
        log_r_S = sample_sums(log_r_N, batch.cu_seqlens_S)
        bound, exponent_N = correction.sequence_truncation, to_tokens(log_r_S, batch.cu_seqlens_S, num_tokens=len(log_r_N))
    ratio_N = exponent_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).to(log_r_N.dtype).exp()
    return ratio_N.clamp(max=bound), ratio_N > bound


def _masked(correction: Correction, log_r_N: Tensor, batch: LossBatch) -> Tensor:
    """[N] bool: whether the token's ratio, or its sequence's geometric mean, is out of bounds.

    Source: IcePop (arXiv:2510.18855); geometric mean: verl's `seq_mean_k1` rejection.
    """
    masked_N = torch.zeros_like(log_r_N, dtype=torch.bool)
    if correction.token_mask is not None:
        masked_N = masked_N | _is_outside(log_r_N.exp(), correction.token_mask)
    if correction.geometric_mask is not None:
        counted_S = sample_sums(batch.loss_mask_N, batch.cu_seqlens_S).clamp(min=1.0)
        mean_S = (sample_sums(log_r_N * batch.loss_mask_N, batch.cu_seqlens_S) / counted_S).exp()
        is_outside_S = _is_outside(mean_S, correction.geometric_mask)
        masked_N = masked_N | to_tokens(is_outside_S, batch.cu_seqlens_S, num_tokens=len(log_r_N))
    return masked_N


def _is_outside(ratio: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (ratio < bounds[0]) | (ratio > bounds[1])


def _ones(log_r_N: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones_like(log_r_N), torch.zeros_like(log_r_N, dtype=torch.bool)
