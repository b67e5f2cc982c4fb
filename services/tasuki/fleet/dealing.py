"""Which node of a fleet generates for which prompts: pure functions of prompts and loads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

TokenIds = Sequence[int]


def deal_prompts(prompts: Sequence[TokenIds], *, num_samples: int, loads: Sequence[int]) -> list[list[range]]:
    """Positions of each node's prompts as runs of neighbours, so that all nodes have about as much to do.

    All samples of a prompt stay on one node, and so do prompts that share their KV cache (`prompt_families`).

    loads: samples that each node has already, running or queued.
    """
    families = prompt_families(prompts)
    shares = deal_families([num_samples * len(family) for family in families], loads=loads)
    return [_runs(sorted(position for index in share for position in families[index])) for share in shares]


def prompt_families(prompts: Sequence[TokenIds]) -> list[list[int]]:
    """Positions of prompts of which one begins all others, as a turn of a conversation begins the next. Ordered by their first.

    A beginning that prompts merely have in common, such as a system prompt, does not join them: it would join all.
    """
    families: dict[int, list[int]] = {}
    root = -1
    # What begins with a prompt follows it, before anything else does.
    for position in sorted(range(len(prompts)), key=lambda position: tuple(prompts[position])):
        if root < 0 or list(prompts[position][: len(prompts[root])]) != list(prompts[root]):
            root = position
        families.setdefault(root, []).append(position)
    return sorted((sorted(family) for family in families.values()), key=lambda family: family[0])


def deal_families(sizes: Sequence[int], *, loads: Sequence[int]) -> list[list[int]]:
    """Indices of the families that each node gets: neighbours, up to the node that the middle of a family falls to.

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
    """Samples for each node after which all have equally many, or those that have more already get none."""
    idlest = sorted(range(len(loads)), key=lambda node: loads[node])
    while len(idlest) * loads[idlest[-1]] > num_samples + sum(loads[node] for node in idlest):
        idlest.pop()
    level = (num_samples + sum(loads[node] for node in idlest)) / len(idlest)
    return [level - load if node in idlest else 0.0 for node, load in enumerate(loads)]


def _runs(positions: Sequence[int]) -> list[range]:
    """Neighbours together. positions: ascending."""
    runs: list[range] = []
    for position in positions:
        if runs and runs[-1].stop == position:
            runs[-1] = range(runs[-1].start, position + 1)
        else:
            runs.append(range(position, position + 1))
    return runs
