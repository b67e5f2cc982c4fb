"""Sums and averages of losses over any cut of a batch."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasuki.algorithms.aggregation import call_denominator, denominator, token_weights
from tasuki.algorithms.batch import LossSum, Metric
from tasuki.algorithms.loss_types import Aggregation, Correction, LossConfig, OldPolicy
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.algorithms.objective import policy_loss, value_loss
from tasuki.trainer.wire import merge_metrics
from tasuki.v1.trainer_pb2 import MetricPart
from tests.extent import examples
from tests.unit.every_loss import EVERY, has_ratio
from tests.unit.loss_batches import Case, part, random_case

LENGTH = 16
CONFIGS = [
    LossConfig(aggregation=aggregation, aggregation_length=LENGTH if aggregation is Aggregation.CONSTANT else None)
    for aggregation in Aggregation
]


def _aggregated(losses: list[list[float]], masks: list[list[int]], aggregation: Aggregation) -> float:
    """Computes the means by their definitions, in loops."""
    sums = [sum(x * m for x, m in zip(loss, mask, strict=True)) for loss, mask in zip(losses, masks, strict=True)]
    counts = [sum(mask) for mask in masks]
    num_counted = sum(count > 0 for count in counts)
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            return sum(sums) / max(sum(counts), 1)
        case Aggregation.SEQUENCE_MEAN_TOKEN_SUM:
            return sum(sums) / max(num_counted, 1)
        case Aggregation.SEQUENCE_MEAN_TOKEN_MEAN:
            return sum(x / n for x, n in zip(sums, counts, strict=True) if n) / max(num_counted, 1)
        case Aggregation.CONSTANT:
            return sum(sums) / (len(losses) * LENGTH)


samples = st.lists(st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 1)), max_size=6), min_size=1, max_size=6)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.aggregation)
@given(samples=samples, at=st.integers(0, 6))
def test_weights_give_the_mean_that_they_stand_for_over_any_cut(
    config: LossConfig, samples: list[list[tuple[float, int]]], at: int
) -> None:
    losses, masks = ([[pair[i] for pair in sample] for sample in samples] for i in (0, 1))
    mask_N, num_completion_S = (
        np.array([m for mask in masks for m in mask], dtype=np.float32),
        np.array([len(s) for s in samples]),
    )
    total = denominator(mask_N, num_completion_S, config=config)
    start = num_completion_S[:at].sum()
    weights_N = np.concatenate(
        [
            token_weights(mask_N[:start], num_completion_S[:at], config=config, denominator=total),
            token_weights(mask_N[start:], num_completion_S[at:], config=config, denominator=total),
        ]
    )
    assert weights_N.dtype == np.float32
    assert (weights_N[mask_N == 0] == 0).all()
    losses_N = np.array([x for loss in losses for x in loss])
    np.testing.assert_allclose(losses_N @ weights_N, _aggregated(losses, masks, config.aggregation), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [(Aggregation.TOKEN_MEAN, 4.0), (Aggregation.SEQUENCE_MEAN_TOKEN_MEAN, 2.0), (Aggregation.SEQUENCE_MEAN_TOKEN_SUM, 2.0)],
)
def test_the_divisor_counts_the_whole_call(aggregation: Aggregation, expected: float) -> None:
    masks = [[], [1.0, 0.0], [0.0]]
    assert call_denominator(masks, [3, 2, 1], config=LossConfig(aggregation=aggregation)) == expected


def test_a_given_denominator_replaces_the_calls_own_count() -> None:
    config = LossConfig(denominator=100.0)
    mask_N, num_completion_S = np.ones(4), np.array([4])
    assert denominator(mask_N, num_completion_S, config=config) == 100.0
    np.testing.assert_allclose(token_weights(mask_N, num_completion_S, config=config, denominator=100.0), 0.01)


CORRECTION = Correction(token_truncation=None, sequence_truncation=1.5, token_mask=(0.5, 2.0), geometric_mask=(0.7, 1.4))


def _config(loss, **settings) -> LossConfig:
    constant = settings.get("aggregation") is Aggregation.CONSTANT
    if not isinstance(loss, ValueLoss):
        settings = {"kl_coef": 0.1, "entropy_coef": 0.01, "correction": CORRECTION, **settings}
    if has_ratio(loss):
        settings = {"old_policy": OldPolicy.GIVEN, **settings}
    return LossConfig(loss=loss, aggregation_length=16 if constant else None, **settings)


def _loss_sum(config: LossConfig, case: Case) -> LossSum:
    if isinstance(config.loss, ValueLoss):
        return value_loss(config, values_N=case.log_probs_N, batch=case.batch)
    return policy_loss(config, log_probs_N=case.log_probs_N, entropy_N=case.entropy_N, batch=case.batch)


@pytest.mark.parametrize("loss", EVERY, ids=str)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any),
    seed=st.integers(0, 1 << 20),
    aggregation=st.sampled_from(Aggregation),
    cuts=st.sets(st.integers(0, 6)),
)
@settings(max_examples=examples(40), deadline=None)
def test_parts_add_up_to_the_loss_its_gradient_and_its_metrics(
    loss, lengths: list[int], seed: int, aggregation: Aggregation, cuts: set[int]
) -> None:
    config = _config(loss, aggregation=aggregation)
    case = random_case(config, seed=seed, lengths=tuple(lengths))
    bounds = sorted({0, len(lengths), *(min(cut, len(lengths)) for cut in cuts)})
    whole = _loss_sum(config, case)
    parts = [_loss_sum(config, part(case, range(a, b))) for a, b in itertools.pairwise(bounds)]
    total = torch.stack([each.loss for each in parts]).sum()
    torch.testing.assert_close(total, whole.loss, rtol=1e-6, atol=1e-9)
    (grad_N,), (expected_N,) = (torch.autograd.grad(value, case.log_probs_N) for value in (total, whole.loss))
    torch.testing.assert_close(grad_N, expected_N, rtol=1e-6, atol=1e-9)
    for name, metric in whole.metrics.items():
        merged = functools.reduce(Metric.merge, [each.metrics[name] for each in parts])
        torch.testing.assert_close(merged.value, metric.value, rtol=1e-6, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("loss", EVERY, ids=str)
def test_masked_tokens_add_nothing_even_if_their_numbers_are_not_finite(loss) -> None:
    config = _config(loss)
    case = random_case(config)
    expected = _loss_sum(config, case)
    (expected_grad_N,) = torch.autograd.grad(expected.loss, case.log_probs_N)
    is_masked_N = case.batch.loss_mask_N == 0
    for name in ("rollout_log_probs_N", "old_log_probs_N", "advantages_N", "ref_log_probs_N", "values_N", "returns_N"):
        getattr(case.batch, name)[is_masked_N] = torch.nan
    result = _loss_sum(config, case)
    (grad_N,) = torch.autograd.grad(result.loss, case.log_probs_N)
    assert is_masked_N.any()
    assert torch.equal(result.loss, expected.loss)
    assert torch.equal(grad_N[~is_masked_N], expected_grad_N[~is_masked_N])
    for name, metric in result.metrics.items():
        assert torch.equal(metric.total, expected.metrics[name].total), name


@pytest.mark.parametrize("loss", EVERY, ids=str)
@pytest.mark.parametrize("lengths", [(3, 2), (0, 0), ()])
def test_nothing_counted_gives_exactly_zero_with_a_zero_gradient(loss, lengths: tuple[int, ...]) -> None:
    config = _config(loss)
    case = random_case(config, lengths=lengths)
    zeros_N = torch.zeros_like(case.batch.loss_mask_N)
    case = dataclasses.replace(case, batch=dataclasses.replace(case.batch, weights_N=zeros_N, loss_mask_N=zeros_N))
    result = _loss_sum(config, case)
    (grad_N,) = torch.autograd.grad(result.loss, case.log_probs_N)
    assert result.loss.item() == 0.0
    assert (grad_N == 0).all()
    assert all(metric.value.isnan() for metric in result.metrics.values())


@pytest.mark.parametrize("loss", EVERY, ids=str)
def test_huge_ratios_stay_finite_in_float32(loss) -> None:
    config = _config(loss)
    case = random_case(config, spread=500.0, dtype=torch.float32)
    result = _loss_sum(config, case)
    (grad_N,) = torch.autograd.grad(result.loss, case.log_probs_N)
    assert torch.isfinite(result.loss)
    assert torch.isfinite(grad_N).all()


@pytest.mark.parametrize("clip", [None, 0.2, 1.5])
def test_value_loss_is_the_larger_of_two_squared_errors(clip: float | None) -> None:
    config = LossConfig(loss=ValueLoss(clip=clip))
    case = random_case(config)
    result = value_loss(config, values_N=case.log_probs_N, batch=case.batch)
    (grad_N,) = torch.autograd.grad(result.loss, case.log_probs_N)
    batch, total, num_clipped = case.batch, 0.0, 0
    rows = zip(*(x.tolist() for x in (case.log_probs_N, batch.values_N, batch.returns_N, batch.weights_N, grad_N)), strict=True)
    for value, old, target, weight, grad in rows:
        clipped = value if clip is None else min(max(value, old - clip), old + clip)
        is_clipped = (clipped - target) ** 2 > (value - target) ** 2
        num_clipped += is_clipped and weight > 0
        total += weight * 0.5 * ((clipped if is_clipped else value) - target) ** 2
        assert grad == pytest.approx(0.0 if is_clipped else weight * (value - target), rel=1e-6, abs=1e-12)
    assert result.loss.item() == pytest.approx(total, rel=1e-6)
    if clip is not None:
        assert result.metrics["clip_fraction"].total.item() == num_clipped


def test_clip_metrics_tell_the_sides_apart() -> None:
    config = LossConfig(old_policy=OldPolicy.GIVEN, correction=Correction(token_truncation=None))
    case = random_case(config, lengths=(5,))
    case.batch.loss_mask_N.fill_(1.0)
    assert case.batch.old_log_probs_N is not None
    log_probs_N = case.batch.old_log_probs_N + torch.tensor([0.5, 1.0, 1.0, 1.5, 1.5], dtype=torch.float64).log()
    case.batch.advantages_N.copy_(torch.tensor([-1.0, 1.0, -1.0, 1.0, -1.0]))
    metrics = policy_loss(config, log_probs_N=log_probs_N, entropy_N=case.entropy_N, batch=case.batch).metrics
    assert metrics["clip_fraction"].value.item() == pytest.approx(0.4)
    assert metrics["clip_fraction_low"].value.item() == pytest.approx(0.2)
    assert metrics["clip_fraction_high"].value.item() == pytest.approx(0.2)
    assert metrics["ratio"].value.item() == pytest.approx(1.1)
    assert metrics["ratio_max"].value.item() == pytest.approx(1.5)


def test_the_gap_to_the_rollout_counts_samples_of_the_current_version_only() -> None:
    config = LossConfig()
    case = random_case(config, lengths=(3, 2))
    case.batch.loss_mask_N.copy_(torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]))
    case.batch.is_current_N.copy_(torch.tensor([True, True, True, False, False]))
    gap_N = (case.log_probs_N - case.batch.rollout_log_probs_N).abs().detach()
    metrics = policy_loss(config, log_probs_N=case.log_probs_N, entropy_N=case.entropy_N, batch=case.batch).metrics
    torch.testing.assert_close(metrics["log_prob_gap"].value, gap_N[[0, 2]].mean())
    torch.testing.assert_close(metrics["log_prob_gap_max"].value, gap_N[[0, 2]].max())
    for weight, shown in ((0.0, {}), (2.0, {"log_prob_gap_max": 0.0})):
        whole = MetricPart(total=0.0, weight=weight, is_maximum=True)
        assert merge_metrics({"log_prob_gap_max": whole}) == shown, "without such samples there is no gap"
