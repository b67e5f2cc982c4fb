"""Computes a micro-batch's part of the loss from a model's outputs and a `LossConfig`. Shape suffixes: N tokens, S samples."""

from __future__ import annotations

import torch
from torch import Tensor

from tasuki.algorithms.batch import LossBatch, LossSum, Metric, max_metric, mean_metric, weighted_sum
from tasuki.algorithms.correction import correction_weights
from tasuki.algorithms.kl import kl_divergence, log_ratio
from tasuki.algorithms.loss_types import (
    KlEstimator,
    LossConfig,
    OldPolicy,
    PolicyGradientLoss,
    SftLoss,
    ValueLoss,
)
from tasuki.algorithms.surrogates import policy_gradient, surrogate


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
    """The critic's loss: half the squared error of each token's value, the larger of the clipped and unclipped error.

    values_N: [N] float32. The explained variance of old values is `advantages.explained_variance`.
    Source: PPO's code as described in "Implementation matters" (arXiv:2005.12729) sec. 3, item 1.
    """
    assert isinstance(config.loss, ValueLoss) and batch.returns_N is not None
    error_N = (values_N - batch.returns_N).square()
    metrics = {
        "value": mean_metric(values_N, batch.loss_mask_N),
        "return": mean_metric(batch.returns_N, batch.loss_mask_N),
        "squared_error": mean_metric(error_N, batch.loss_mask_N),
    }
    if config.loss.clip is not None:
        assert batch.values_N is not None
        clipped_N = values_N.clamp(batch.values_N - config.loss.clip, batch.values_N + config.loss.clip)
        clipped_error_N = (clipped_N - batch.returns_N).square()
        metrics["clip_fraction"] = mean_metric(clipped_error_N > error_N, batch.loss_mask_N)
        error_N = torch.maximum(error_N, clipped_error_N)
    return _loss_sum(0.5 * error_N, metrics, batch)


def _policy_term(config: LossConfig, *, log_probs_N: Tensor, batch: LossBatch) -> tuple[Tensor, dict[str, Metric]]:
    """Corrected policy loss of each token [N], and its metrics."""
    if isinstance(config.loss, SftLoss):
        return -log_probs_N, {}
    assert batch.advantages_N is not None
    if isinstance(config.loss, PolicyGradientLoss):
        loss_N, metrics = policy_gradient(log_probs_N=log_probs_N, advantages_N=batch.advantages_N), {}
    else:
        old_log_probs_N = _old_log_probs(config.old_policy, log_probs_N=log_probs_N, batch=batch)
        log_ratio_N = log_ratio(log_probs_N, old_log_probs_N)
        bounded = surrogate(config.loss, log_probs_N=log_probs_N, log_ratio_N=log_ratio_N, batch=batch)
        loss_N, metrics = bounded.loss_N, bounded.metrics(batch.loss_mask_N)
        old_kl_N = kl_divergence(old_log_probs_N, ref_log_probs_N=log_probs_N.detach(), estimator=KlEstimator.K3)
        metrics["old_kl"] = mean_metric(old_kl_N, batch.loss_mask_N)
    correction = correction_weights(config, log_probs_N=log_probs_N, batch=batch)
    if correction is not None:
        loss_N = loss_N * correction.weights_N
        metrics.update(correction.metrics(batch.loss_mask_N))
    return loss_N, metrics


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
