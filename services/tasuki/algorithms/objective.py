"""Computes a micro-batch's part of the loss from a model's outputs and a `LossConfig`. Shape suffixes: N tokens, S samples."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tasuki.algorithms.batch import LossBatch, LossSum, Metric, max_metric, mean_metric, sample_sums, to_tokens, weighted_sum
from tasuki.algorithms.loss import MAX_LOG_RATIO, CriticLoss, PolicyLoss, RatioInputs, RatioLoss
from tasuki.algorithms.loss_types import Correction, KlEstimator, LossConfig, OldPolicy


def policy_loss(config: LossConfig, *, log_probs_N: Tensor, entropy_N: Tensor, batch: LossBatch) -> LossSum:
    """The policy's loss: policy term times correction, plus kl_coef * KL to the reference, minus entropy_coef * entropy.

    log_probs_N, entropy_N: [N] float32, of the policy, in nats; the entropy needs a gradient only if entropy_coef is not 0.
    Metrics are means over counted tokens, "..._max" maxima; "loss" is weighed by `weights_N`. Does not synchronize with the device.
    The correction applies only to the policy term: KL and entropy of a masked token still count.
    """
    loss_N, metrics = _policy_term(config, log_probs_N=log_probs_N, batch=batch)
    if batch.ref_log_probs_N is not None:
        kl_N = kl_divergence(log_probs_N, ref_log_probs_N=batch.ref_log_probs_N, estimator=config.kl_estimator)
        metrics["ref_kl"] = mean_metric(kl_N, batch.loss_mask_N)
        if config.kl_coef != 0.0:
            loss_N = loss_N + config.kl_coef * kl_N
    else:
        assert config.kl_coef == 0.0, "kl_coef needs ref_log_probs"
    metrics["entropy"] = mean_metric(entropy_N, batch.loss_mask_N)
    if config.entropy_coef != 0.0:
        loss_N = loss_N - config.entropy_coef * entropy_N
    metrics.update(_rollout_gap(log_probs_N, batch))
    return _loss_sum(loss_N, metrics, batch)


def value_loss(config: LossConfig, *, values_N: Tensor, batch: LossBatch) -> LossSum:
    """The critic's loss. values_N: [N] float32. The explained variance of old values is `advantages.explained_variance`."""
    assert isinstance(config.loss, CriticLoss)
    critic = config.loss.token_loss(values_N, batch)
    return _loss_sum(critic.loss_N, _means(critic.metrics, batch), batch)


def _policy_term(config: LossConfig, *, log_probs_N: Tensor, batch: LossBatch) -> tuple[Tensor, dict[str, Metric]]:
    """Corrected policy loss of each token [N], and its metrics."""
    if isinstance(config.loss, RatioLoss):
        assert batch.advantages_N is not None
        old_log_probs_N = _old_log_probs(config.old_policy, log_probs_N=log_probs_N, batch=batch)
        policy = config.loss.token_loss(
            RatioInputs(
                log_probs_N=log_probs_N,
                old_log_probs_N=old_log_probs_N,
                log_ratio_N=log_ratio(log_probs_N, old_log_probs_N),
                advantages_N=batch.advantages_N,
                batch=batch,
            )
        )
        metrics = _means(policy.metrics, batch)
        metrics["ratio_max"] = max_metric(policy.metrics["ratio"], batch.loss_mask_N)
        old_kl_N = kl_divergence(old_log_probs_N, ref_log_probs_N=log_probs_N.detach(), estimator=KlEstimator.K3)
        metrics["old_kl"] = mean_metric(old_kl_N, batch.loss_mask_N)
    else:
        assert isinstance(config.loss, PolicyLoss)
        policy = config.loss.token_loss(log_probs_N, batch)
        metrics = _means(policy.metrics, batch)
    correction = correction_weights(config, log_probs_N=log_probs_N, batch=batch)
    if correction is None:
        return policy.loss_N, metrics
    return policy.loss_N * correction.weights_N, metrics | correction.metrics(batch.loss_mask_N)


def _means(metrics: Mapping[str, Tensor], batch: LossBatch) -> dict[str, Metric]:
    return {name: mean_metric(x_N, batch.loss_mask_N) for name, x_N in metrics.items()}


def _old_log_probs(old_policy: OldPolicy, *, log_probs_N: Tensor, batch: LossBatch) -> Tensor:
    match old_policy:
        case OldPolicy.CURRENT:
            return log_probs_N.detach()
        case OldPolicy.GIVEN:
            assert batch.old_log_probs_N is not None
            return batch.old_log_probs_N
        case OldPolicy.ROLLOUT:
            assert batch.rollout_log_probs_N is not None
            return batch.rollout_log_probs_N


def _rollout_gap(log_probs_N: Tensor, batch: LossBatch) -> dict[str, Metric]:
    """Mismatch between trainer and rollout on samples of the version in training, where it should be zero."""
    if batch.rollout_log_probs_N is None:
        return {}
    current_mask_N = batch.loss_mask_N * batch.is_current_N
    gap_N = (log_probs_N.detach() - batch.rollout_log_probs_N).abs()
    rollout_kl_N = kl_divergence(batch.rollout_log_probs_N, ref_log_probs_N=log_probs_N.detach(), estimator=KlEstimator.K3)
    return {
        "log_prob_gap": mean_metric(gap_N, current_mask_N),
        "log_prob_gap_max": max_metric(gap_N, current_mask_N),
        "rollout_kl": mean_metric(rollout_kl_N, current_mask_N),
    }


def _loss_sum(loss_N: Tensor, metrics: dict[str, Metric], batch: LossBatch) -> LossSum:
    loss = weighted_sum(loss_N, batch.weights_N)
    return LossSum(loss=loss, metrics={"loss": Metric(loss.detach(), batch.weights_N.sum()), **metrics})


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
            return _k3(log_r_N)
        case KlEstimator.K3_STRAIGHT_THROUGH:
            k2_N = 0.5 * log_r_N.square()
            return _k3(log_r_N).detach() + (k2_N - k2_N.detach())


def _k3(log_r_N: Tensor) -> Tensor:
    """r - 1 - log r, whose terms cancel near 0: three terms of its series are exact there to float32."""
    series_N = 0.5 * log_r_N.square() * (1.0 + log_r_N / 3.0 + log_r_N.square() / 12.0)
    return torch.where(log_r_N.abs() < 1e-2, series_N, log_r_N.expm1() - log_r_N)


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
