"""Which node of a fleet learns from which samples, and how samples are cut into messages: pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import TypeVar

import numpy as np
from google.protobuf.message import Message

from tasuki.trainer.data.cost import SampleCost
from tasuki.wire.channel import MAX_CHUNK_BYTES

_Part = TypeVar("_Part", bound=Message)


def deal_samples(num_tokens: Sequence[int], *, num_nodes: int, cost: SampleCost) -> list[list[int]]:
    """Ascending positions of each node's samples, about even in cost: the dearest first, each to the node that has the least.

    Depends on the arguments alone, so that a call that is repeated gives every node the same samples again.
    """
    costs = cost.flops(np.asarray(num_tokens, dtype=np.int64)).tolist()
    shares: list[list[int]] = [[] for _ in range(num_nodes)]
    loads = [(0.0, node) for node in range(num_nodes)]
    heapify(loads)
    for position in sorted(range(len(costs)), key=lambda position: (-costs[position], position)):
        load, node = heappop(loads)
        shares[node].append(position)
        heappush(loads, (load + costs[position], node))
    return [sorted(share) for share in shares]


def chunks(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Runs that fit a message; a single part always does, since so did the request that it came with. None for no parts."""
    chunk: list[_Part] = []
    chunk_bytes = 0
    for part in parts:
        part_bytes = part.ByteSize()
        if chunk and chunk_bytes + part_bytes > MAX_CHUNK_BYTES:
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append(part)
        chunk_bytes += part_bytes
    if chunk:
        yield chunk
