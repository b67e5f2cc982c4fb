"""Distributes the samples of a fleet's call over its nodes, with one divisor for the whole call. Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from tasuki.algorithms.aggregation import denominator
from tasuki.algorithms.loss_types import LossConfig
from tasuki.trainer.data.cost import SampleCost
from tasuki.trainer.data.plan import plan_micro_batches


def split_samples(
    lengths: Sequence[int],
    *,
    completions: Sequence[int] | None = None,
    num_nodes: int,
    num_ranks: int,
    max_tokens: int,
    cost: SampleCost,
) -> list[list[int]]:
    """Positions of each node's samples, ascending, with about equal work; with few samples some nodes get none.

    Plans micro-batches over the ranks of all nodes; each node then plans its share for its own ranks.

    lengths: tokens of each sample, at least one sample, none above `max_tokens`. completions: of which a completion's; by default all.
    num_ranks: of each node; ranks that share a micro-batch count as one. max_tokens: the smallest `micro_batch_tokens` of all nodes.
    """
    plan = plan_micro_batches(
        lengths, completions=completions, num_ranks=num_nodes * num_ranks, max_tokens=max_tokens, cost=cost
    )
    # Round-robin over nodes, so that few samples are spread over them.
    return [sorted(chain(*(chain(*plan[rank]) for rank in range(node, len(plan), num_nodes)))) for node in range(num_nodes)]


def call_denominator(
    loss_masks: Sequence[Sequence[float]], num_completion_tokens: Sequence[int], *, config: LossConfig
) -> float:
    """Divisor of the call's loss, independent of the distribution; goes into the header of every share.

    loss_masks: of each sample; empty if all its tokens count.
    """
    masks = [mask or [1.0] * length for mask, length in zip(loss_masks, num_completion_tokens, strict=True)]
    mask_N = np.fromiter(chain.from_iterable(masks), dtype=np.float64)
    return denominator(mask_N, np.asarray(num_completion_tokens, dtype=np.int64), config=config)
