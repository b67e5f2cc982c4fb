"""Plans micro-batches for single samples or for groups that share the computation of their prompt."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np

from tasuki.config.schema import NodeConfig
from tasuki.trainer.data.cost import SampleCost
from tasuki.trainer.data.plan import MicroBatchPlan, plan_micro_batches, plan_units
from tasuki.trainer.data.samples import NO_PREFIX, Samples, starts


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
    """FLOPs of samples, alone or with a shared prompt."""

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
