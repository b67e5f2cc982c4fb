"""Samples dealt to the trainers of a fleet."""

from __future__ import annotations

import random

from tasuki.fleet.shares import chunks, deal_samples
from tasuki.trainer.data.cost import SampleCost
from tasuki.v1.types_pb2 import TrainingSample
from tasuki.wire.channel import MAX_CHUNK_BYTES

COST = SampleCost(linear=1.0, quadratic=0.01)


def test_every_sample_is_dealt_once_and_shares_differ_by_one_sample_at_most() -> None:
    chosen = random.Random(0)
    for _ in range(200):
        lengths = [chosen.randint(1, 500) for _ in range(chosen.randint(1, 60))]
        shares = deal_samples(lengths, num_nodes=chosen.randint(1, 7), cost=COST)
        assert sorted(position for share in shares for position in share) == list(range(len(lengths)))
        assert all(share == sorted(share) for share in shares)
        costs = [sum(lengths[position] + 0.01 * lengths[position] ** 2 for position in share) for share in shares]
        assert max(costs) - min(costs) <= max(length + 0.01 * length**2 for length in lengths) + 1e-6


def test_chunks_fit_a_message_and_keep_the_order() -> None:
    samples = [TrainingSample(prompt_token_ids=[1], completion_token_ids=[70000] * 60_000) for _ in range(20)]
    cut = list(chunks(samples))
    assert [one for chunk in cut for one in chunk] == samples
    assert len(cut) > 1 and all(sum(one.ByteSize() for one in chunk) <= MAX_CHUNK_BYTES for chunk in cut)
    assert list(chunks([])) == []
