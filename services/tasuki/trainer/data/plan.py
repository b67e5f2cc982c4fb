"""Assigns samples, and groups that share the computation of their prompt, to micro-batches, ranks and a fleet's nodes: one pure plan over
all ranks of a call. No torch."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import NamedTuple

import numpy as np

from tasuki.config.schema import NodeConfig
from tasuki.trainer.data.cost import SampleCost
from tasuki.trainer.data.samples import NO_PREFIX, SampleImages, Samples, starts

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


class Sharing(Enum):
    NEVER = auto()
    WHERE_CHEAPER = auto()
    """Shares if that takes fewer operations."""
    ALWAYS = auto()

    @classmethod
    def of(cls, config: NodeConfig, *, is_possible: bool) -> "Sharing":
        """is_possible: whether the ranks' attention can share prompts."""
        if not is_possible:
            return cls.NEVER
        return cls.WHERE_CHEAPER if config.trainer.prefix_sharing == "auto" else cls.ALWAYS


def plan_shared(
    samples: Samples, *, num_ranks: int, max_tokens: int, cost: SampleCost, sharing: Sharing
) -> tuple[Samples, MicroBatchPlan]:
    """Returns the samples, with `prefix_S` if they are to share, and the cheapest plan with groups whole, in two parts, in four, ...

    A part of a group fits `max_tokens` with its prompt counted once, and computes the prompt separately.
    """
    lengths = samples.num_tokens_S.tolist()
    completions = samples.num_completion_S.tolist()
    alone = plan_micro_batches(
        lengths, completions=completions, images=samples.images, num_ranks=num_ranks, max_tokens=max_tokens, cost=cost
    )
    if sharing is Sharing.NEVER:
        return samples, alone
    groups = _groups_of_prompts(samples)
    if not groups:
        return samples, alone
    flops = _Flops.of(samples, groups, cost)
    plans: list[MicroBatchPlan] = []
    num_parts = 1
    while num_parts < 2 * max(map(len, groups)):
        units = list(_units(samples, groups, num_parts=num_parts, max_tokens=max_tokens))
        plans.append(_planned(units, samples, flops, num_ranks=num_ranks, max_tokens=max_tokens))
        num_parts *= 2
    best = min(plans, key=flops.of_plan)
    if sharing is Sharing.WHERE_CHEAPER and flops.of_plan(best) >= flops.of_plan_alone(alone):
        return samples, alone
    prefix_S = np.full(len(samples), NO_PREFIX, dtype=np.int32)
    for number, group in enumerate(groups):
        prefix_S[group] = number
    return replace(samples, prefix_S=prefix_S), best


@dataclass(frozen=True, slots=True)
class _Flops:
    whole: Sequence[float]
    """FLOPs of each sample including its prompt."""
    prompt: Sequence[float]
    merge: Sequence[float]
    group: Sequence[int]
    """Group of each sample, or NO_PREFIX."""

    @classmethod
    def of(cls, samples: Samples, groups: Sequence[Sequence[int]], cost: SampleCost) -> "_Flops":
        group = [NO_PREFIX] * len(samples)
        for number, positions in enumerate(groups):
            for position in positions:
                group[position] = number
        of_images = 0 if samples.images is None else cost.image_flops(samples.images)
        return cls(
            (cost.flops(samples.num_tokens_S, completions_S=samples.num_completion_S) + of_images).tolist(),
            (cost.flops(samples.num_prompt_S, completions_S=np.zeros_like(samples.num_prompt_S)) + of_images).tolist(),
            (cost.merge * samples.num_completion_S).tolist(),
            group,
        )

    def of_unit(self, unit: Sequence[int]) -> float:
        """FLOPs of samples of one group, or of a single one."""
        if len(unit) == 1:
            return self.whole[unit[0]]
        own = (self.whole[position] - self.prompt[position] + self.merge[position] for position in unit)
        return self.prompt[unit[0]] + sum(own)

    def of_plan(self, plan: MicroBatchPlan) -> float:
        """FLOPs of the plan, with ranks in lock step and shared prompts."""
        return sum(max(map(self._of_micro_batch, step)) for step in zip(*plan, strict=True))

    def of_plan_alone(self, plan: MicroBatchPlan) -> float:
        return sum(max(sum(self.whole[each] for each in part) for part in step) for step in zip(*plan, strict=True))

    def _of_micro_batch(self, positions: Sequence[int]) -> float:
        units: dict[int, list[int]] = defaultdict(list)
        alone = 0.0
        for position in positions:
            if self.group[position] == NO_PREFIX:
                alone += self.whole[position]
            else:
                units[self.group[position]].append(position)
        return alone + sum(map(self.of_unit, units.values()))


def _groups_of_prompts(samples: Samples) -> list[list[int]]:
    """Positions of the samples of each prompt with more than one. Those with other images, or routed to other experts, share none."""
    groups: dict[bytes, list[int]] = defaultdict(list)
    prompts = zip(starts(samples.num_tokens_S).tolist(), samples.num_prompt_S.tolist(), strict=True)
    for position, (first, length) in enumerate(prompts):
        routes = b"" if samples.routes_TR is None else samples.routes_TR[first : first + length].tobytes()
        images = b"" if samples.images is None else samples.images.of(position).tobytes()
        groups[samples.token_ids_T[first : first + length].tobytes() + routes + images].append(position)
    return [group for group in groups.values() if len(group) > 1]


def _units(samples: Samples, groups: Sequence[Sequence[int]], *, num_parts: int, max_tokens: int) -> Iterator[list[int]]:
    """Units of samples: each group in `num_parts` parts, or more if they do not fit, and all other samples alone."""
    num_completion = samples.num_completion_S.tolist()
    grouped: set[int] = set()
    for group in groups:
        grouped.update(group)
        longest_first = sorted(group, key=lambda position: -num_completion[position])
        total = sum(num_completion[position] for position in group)
        room = max(num_completion[longest_first[0]], -(-total // num_parts))
        room = min(room, max_tokens - int(samples.num_prompt_S[group[0]]))
        parts: list[list[int]] = []
        rooms: list[int] = []
        for position in longest_first:
            place = next((index for index, left in enumerate(rooms) if left >= num_completion[position]), len(parts))
            if place == len(parts):
                parts.append([])
                rooms.append(room)
            parts[place].append(position)
            rooms[place] -= num_completion[position]
        yield from parts
    yield from ([position] for position in range(len(samples)) if position not in grouped)


def _planned(
    units: Sequence[Sequence[int]], samples: Samples, flops: _Flops, *, num_ranks: int, max_tokens: int
) -> MicroBatchPlan:
    completions = [int(samples.num_completion_S[list(unit)].sum()) for unit in units]
    lengths = [int(samples.num_prompt_S[unit[0]]) + num for unit, num in zip(units, completions, strict=True)]
    plan = plan_units(lengths, list(map(flops.of_unit, units)), num_ranks=num_ranks, max_tokens=max_tokens)
    return [[sorted(position for index in part for position in units[index]) for part in parts] for parts in plan]
