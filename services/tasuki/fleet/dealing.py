"""Distributes prompts over a fleet's nodes: pure functions of prompts and loads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

TokenIds = Sequence[int]


def deal_prompts(prompts: Sequence[TokenIds], *, num_samples: int, loads: Sequence[int]) -> list[list[range]]:
    """Positions of each node's prompts, as contiguous ranges, so that all nodes have about equal work.

    All samples of a prompt go to one node, and so do prompts that share their KV cache (`prompt_families`).

    loads: samples already running or queued on each node.
    """
    families = prompt_families(prompts)
    shares = deal_families([num_samples * len(family) for family in families], loads=loads)
    return [runs(sorted(position for index in share for position in families[index])) for share in shares]


def prompt_families(prompts: Sequence[TokenIds]) -> list[list[int]]:
    """Groups prompts of which one is a prefix of all others, as in successive turns of a conversation. Ordered by their first.

    A merely common prefix, such as a system prompt, does not group them: it would group all.
    """
    families: dict[int, list[int]] = {}
    root = -1
    # In sorted order, prompts follow their prefix directly.
    for position in sorted(range(len(prompts)), key=lambda position: tuple(prompts[position])):
        if root < 0 or list(prompts[position][: len(prompts[root])]) != list(prompts[root]):
            root = position
        families.setdefault(root, []).append(position)
    return sorted((sorted(family) for family in families.values()), key=lambda family: family[0])


def deal_families(sizes: Sequence[int], *, loads: Sequence[int]) -> list[list[int]]:
    """Indices of the families for each node: contiguous, each assigned to the node in whose share its middle lies.

    sizes: samples of each family.
    """
    ends = list(accumulate(_wanted(sum(sizes), loads=loads)))
    shares: list[list[int]] = [[] for _ in loads]
    begin = 0
    for index, size in enumerate(sizes):
        node = min(bisect_left(ends, begin + size / 2), len(loads) - 1)
        shares[node].append(index)
        begin += size
    return shares


def _wanted(num_samples: int, *, loads: Sequence[int]) -> list[float]:
    """Samples to add to each node so that all have equally many; nodes that already have more get none."""
    idlest = sorted(range(len(loads)), key=lambda node: loads[node])
    while len(idlest) * loads[idlest[-1]] > num_samples + sum(loads[node] for node in idlest):
        idlest.pop()
    level = (num_samples + sum(loads[node] for node in idlest)) / len(idlest)
    return [level - load if node in idlest else 0.0 for node, load in enumerate(loads)]


def runs(positions: Sequence[int]) -> list[range]:
    """Joins consecutive positions to ranges. positions: ascending."""
    runs: list[range] = []
    for position in positions:
        if runs and runs[-1].stop == position:
            runs[-1] = range(runs[-1].start, position + 1)
        else:
            runs.append(range(position, position + 1))
    return runs
