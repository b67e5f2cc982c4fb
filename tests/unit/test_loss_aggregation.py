"""Token weights against the means that they stand for, over any cut of the samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.algorithms.aggregation import denominator, token_weights
from tasuki.algorithms.loss_types import Aggregation, LossConfig

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


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.aggregation)
def test_all_masked_gives_zero_weights(config: LossConfig) -> None:
    mask_N, num_completion_S = np.zeros(3), np.array([1, 2])
    total = denominator(mask_N, num_completion_S, config=config)
    assert (token_weights(mask_N, num_completion_S, config=config, denominator=total) == 0).all()


def test_no_samples_give_no_weights() -> None:
    for config in CONFIGS:
        nothing = np.zeros(0, dtype=np.int64)
        assert denominator(nothing, nothing, config=config) == 0.0
        assert token_weights(nothing, nothing, config=config, denominator=0.0).shape == (0,)


def test_a_given_denominator_replaces_the_calls_own_count() -> None:
    config = LossConfig(denominator=100.0)
    mask_N, num_completion_S = np.ones(4), np.array([4])
    assert denominator(mask_N, num_completion_S, config=config) == 100.0
    np.testing.assert_allclose(token_weights(mask_N, num_completion_S, config=config, denominator=100.0), 0.01)
