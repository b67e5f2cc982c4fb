"""Assigns samples to micro-batches, ranks and a fleet's nodes: one pure plan over all ranks of a call. No torch."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import NamedTuple

import numpy as np

from tasuki.trainer.data.cost import SampleCost
from tasuki.trainer.data.samples import SampleImages

MicroBatchPlan = list[list[list[int]]]
"""[rank][micro-batch] -> positions of samples in the call. All ranks have equally many; some of the last may be empty."""


class _Sample(NamedTuple):
    length: int
    cost: float
    position: int


_Bin = list[_Sample]
_NOTHING = _Sample(0, 0.0, -1)
# Micro-batches count as even if the most expensive costs at most this many times their mean.
_EVEN = 1.001
_MAX_SWAPS = 64


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    completions: Sequence[int] | None = None,
    images: SampleImages | None = None,
    num_ranks: int,
    max_tokens: int,
    cost: SampleCost,
) -> MicroBatchPlan:
    """Plans few micro-batches of at most `max_tokens` tokens, balancing cost between ranks.

    Ranks run in lock step: a round, the k-th micro-batches of all ranks, takes as long as its most expensive one. Rounds are in descending
    cost. A micro-batch is empty only if no other has two samples. The order of samples only affects those of equal length
    and cost.

    lengths: tokens of each sample, at least one sample, none above `max_tokens`. completions: of which a completion's; by default all.
    """
    num_completion_S = None if completions is None else np.asarray(completions, dtype=np.int64)
    flops_S = cost.flops(np.asarray(lengths, dtype=np.int64), completions_S=num_completion_S)
    flops_S += 0 if images is None else cost.image_flops(images)
    return plan_units(lengths, flops_S.tolist(), num_ranks=num_ranks, max_tokens=max_tokens)


def plan_units(lengths: Sequence[int], costs: Sequence[float], *, num_ranks: int, max_tokens: int) -> MicroBatchPlan:
    """Like plan_micro_batches, for samples or indivisible groups with the given `costs`."""
    samples = map(_Sample, lengths, costs, range(len(lengths)))
    descending = sorted(samples, key=lambda sample: (-sample.length, -sample.cost, sample.position))
    assert descending[0].length <= max_tokens, "check_sequences refuses such a sample"
    fewest = _best_fit(descending, max_tokens=max_tokens)
    num_rounds = -(-len(fewest) // num_ranks)
    targets = _targets(sorted(costs, reverse=True), num_ranks=num_ranks, num_rounds=num_rounds)
    bins = _level(descending, targets=[each for each in targets for _ in range(num_ranks)], max_tokens=max_tokens) or fewest
    bins += [[] for _ in range(num_rounds * num_ranks - len(bins))]
    _fill_empty(bins)
    bins.sort(key=_cost, reverse=True)
    for first in range(0, len(bins), num_ranks):
        _even_out(bins[first : first + num_ranks], max_tokens=max_tokens)
    return [[sorted(sample.position for sample in each) for each in bins[rank::num_ranks]] for rank in range(num_ranks)]


def _best_fit(descending: Sequence[_Sample], *, max_tokens: int) -> list[_Bin]:
    """Best-fit decreasing: places each sample in the bin with the least room left. Uses at most 11/9 of the minimum plus one bins."""
    bins: list[_Bin] = []
    rooms: list[tuple[int, int]] = []
    for sample in descending:
        place = bisect_left(rooms, (sample.length, 0))
        if place == len(rooms):
            room, index = max_tokens, len(bins)
            bins.append([])
        else:
            room, index = rooms.pop(place)
        bins[index].append(sample)
        insort(rooms, (room - sample.length, index))
    return bins


def _targets(costs: Sequence[float], *, num_ranks: int, num_rounds: int) -> list[float]:
    """Target cost of a micro-batch in each round: equal, except for rounds of samples that cost more by themselves.

    costs: of the samples, descending. The first `num_ranks` are in the first round, and so on.
    """
    largest = [*costs[::num_ranks][:num_rounds], *[0.0] * num_rounds][:num_rounds]
    remaining = sum(costs) / num_ranks
    for index, single in enumerate(largest):
        level = remaining / (num_rounds - index)
        if single <= level:
            return largest[:index] + [level] * (num_rounds - index)
        remaining -= single
    return largest


def _level(descending: Sequence[_Sample], *, targets: Sequence[float], max_tokens: int) -> list[_Bin] | None:
    """Places each sample in the bin farthest below its target that has room; returns None if there is none."""
    bins: list[_Bin] = [[] for _ in targets]
    rooms = [max_tokens] * len(targets)
    # All of `farthest` have room for the sample. The others wait until samples are short enough for their room.
    farthest, waiting = [(-target, index) for index, target in enumerate(targets)], list[tuple[int, float, int]]()
    heapify(farthest)
    for sample in descending:
        while waiting and -waiting[0][0] >= sample.length:
            heappush(farthest, heappop(waiting)[1:])
        if not farthest:
            return None
        below, index = heappop(farthest)
        bins[index].append(sample)
        rooms[index] -= sample.length
        if rooms[index] >= sample.length:
            heappush(farthest, (below + sample.cost, index))
        else:
            heappush(waiting, (-rooms[index], below + sample.cost, index))
    return bins


def _fill_empty(bins: list[_Bin]) -> None:
    """Moves to each empty bin every second sample of the most expensive bin that has two."""
    for index, each in enumerate(bins):
        if not each:
            dearest = max(range(len(bins)), key=lambda other: _cost(bins[other]) if len(bins[other]) > 1 else 0.0)
            bins[index], bins[dearest] = bins[dearest][1::2], bins[dearest][::2]


def _even_out(bins: Sequence[_Bin], *, max_tokens: int) -> None:
    """Lowers the most expensive bin of a round by exchanges with the others, while that helps."""
    for _ in range(_MAX_SWAPS):
        ascending = sorted(bins, key=_cost)
        dearest = ascending.pop()
        if _cost(dearest) * len(bins) <= _EVEN * sum(map(_cost, bins)):
            return
        if not any(_exchange(dearest, other, max_tokens=max_tokens) for other in ascending):
            return


def _exchange(dear: _Bin, cheap: _Bin, *, max_tokens: int) -> bool:
    """Exchanges a sample for a cheaper one, or for none, to minimize the difference in cost. Returns whether it decreased."""
    least = gap = _cost(dear) - _cost(cheap)
    room = max_tokens - sum(sample.length for sample in cheap)
    dear_room = max_tokens - sum(sample.length for sample in dear)
    partners = sorted([_NOTHING, *cheap], key=lambda partner: partner.cost)
    costs = [partner.cost for partner in partners]
    best: tuple[_Sample, _Sample] | None = None
    for sample in dear:
        nearest = bisect_left(costs, sample.cost - gap / 2)
        for places in (range(nearest - 1, -1, -1), range(nearest, len(partners))):
            for place in places:
                left = abs(gap - 2 * (sample.cost - costs[place]))
                if left >= least:
                    break
                if -dear_room <= sample.length - partners[place].length <= room:
                    least, best = left, (sample, partners[place])
                    break
    if best is None:
        return False
    given, taken = best
    dear.remove(given)
    cheap.append(given)
    if taken is not _NOTHING:
        cheap.remove(taken)
        dear.append(taken)
    return True


def _cost(samples: _Bin) -> float:
    return sum(sample.cost for sample in samples)


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
