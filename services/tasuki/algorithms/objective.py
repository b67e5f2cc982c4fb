"""Computes a micro-batch's part of the loss from a model's outputs and a `LossConfig`. Shape suffixes: N tokens, S samples."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tasuki.algorithms.batch import LossBatch, LossSum, Metric, max_metric, mean_metric, weighted_sum
from tasuki.algorithms.correction import correction_weights
from tasuki.algorithms.kl import kl_divergence, log_ratio
from tasuki.algorithms.loss import CriticLoss, PolicyLoss, RatioInputs, RatioLoss
from tasuki.algorithms.loss_types import KlEstimator, LossConfig, OldPolicy


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
