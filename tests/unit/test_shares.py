"""Shares of a call per node: nothing is lost, work is even, and the divisor is that of the whole call."""

import numpy as np
import pytest

from tasuki.algorithms.aggregation import call_denominator
from tasuki.algorithms.loss_types import Aggregation, LossConfig
from tasuki.trainer.data.cost import SampleCost
from tasuki.trainer.data.plan import split_samples

COST = SampleCost(linear=1.0, quadratic=0.01)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 16])
@pytest.mark.parametrize("num_samples", [1, 5, 64])
def test_every_sample_goes_to_one_node(num_nodes: int, num_samples: int) -> None:
    lengths = np.random.default_rng(num_samples).integers(2, 200, size=num_samples).tolist()
    shares = split_samples(lengths, num_nodes=num_nodes, num_ranks=2, max_tokens=256, cost=COST)
    assert sorted(position for share in shares for position in share) == list(range(num_samples))
    assert len(shares) == num_nodes and all(share == sorted(share) for share in shares)
    assert sum(map(bool, shares)) == min(num_nodes, num_samples)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [(Aggregation.TOKEN_MEAN, 4.0), (Aggregation.SEQUENCE_MEAN_TOKEN_MEAN, 2.0), (Aggregation.SEQUENCE_MEAN_TOKEN_SUM, 2.0)],
)
def test_the_divisor_counts_the_whole_call(aggregation: Aggregation, expected: float) -> None:
    masks = [[], [1.0, 0.0], [0.0]]
    assert call_denominator(masks, [3, 2, 1], config=LossConfig(aggregation=aggregation)) == expected
