"""Distributes the samples of a fleet's call over its nodes. Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

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
