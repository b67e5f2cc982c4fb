"""How the samples of a fleet's call are dealt to its nodes, and what the whole call is divided by. Pure, and without torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from tasuki.algorithms.aggregation import denominator
from tasuki.algorithms.loss_types import LossConfig
from tasuki.trainer.data.cost import SampleCost
from tasuki.trainer.data.plan import plan_micro_batches


def deal_samples(
    lengths: Sequence[int], *, num_nodes: int, num_ranks: int, max_tokens: int, cost: SampleCost
) -> list[list[int]]:
    """Positions of each node's samples, ascending, so that all nodes have about as much to compute; few samples leave nodes without any.

    It is one plan of micro-batches over the ranks of all nodes; a node then plans its share for its own ranks.

    lengths: tokens of each sample, at least one sample, none above `max_tokens`. num_ranks: of each node, those that share a micro-batch
    counted as one. max_tokens: `micro_batch_tokens` of the node that has the least.
    """
    plan = plan_micro_batches(lengths, num_ranks=num_nodes * num_ranks, max_tokens=max_tokens, cost=cost)
    # Ranks are dealt in turn: of few samples each node gets some.
    return [sorted(chain(*(chain(*plan[rank]) for rank in range(node, len(plan), num_nodes)))) for node in range(num_nodes)]


def call_denominator(
    loss_masks: Sequence[Sequence[float]], num_completion_tokens: Sequence[int], *, config: LossConfig
) -> float:
    """What a call's loss is divided by, whatever node its samples are on: what the header of every share names.

    loss_masks: of each sample, empty where all its tokens count.
    """
    masks = [mask or [1.0] * length for mask, length in zip(loss_masks, num_completion_tokens, strict=True)]
    mask_N = np.fromiter(chain.from_iterable(masks), dtype=np.float64)
    return denominator(mask_N, np.asarray(num_completion_tokens, dtype=np.int64), config=config)
