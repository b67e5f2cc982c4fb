"""Which settings to change if a plan does not fit. Every answer comes from planning again with the change, never from a rule of thumb."""

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import combinations, product

from tasuki.config.load import changed, value_at
from tasuki.config.trainer_schema import LoraConfig
from tasuki.planner.choose import MIN_TOKENS, choose, may_fit
from tasuki.planner.kv_tokens import longest_sample, running_requests, samples_at_once
from tasuki.planner.node import Checkpointing, Node, Strategy, node_of
from tasuki.planner.plan import Plan, plan
from tasuki.planner.residency import decide
from tasuki.wire.errors import InvalidArgument

_RATIO_STEPS = 100
_FEW_REQUESTS = 64
_KV_RATIO, _BUDGET, _LORA = "rollout.kv_ratio", "memory.host_budget_bytes", "trainer.lora.rank"


@dataclass(frozen=True, slots=True)
class Rung:
    """One changed key, on top of those before it, and the resulting plan."""

    setting: str
    old: str
    new: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Advice:
    """Answers for one plan."""

    max_kv_ratio: float | None
    """Largest ratio, in hundredths, at which everything fits; None if none."""
    ladder: tuple[Rung, ...]
    """Changes that together make it fit; empty if it already fits, or if none do."""

    @property
    def solves(self) -> bool:
        return bool(self.ladder) and self.ladder[-1].plan.fits


def advise(planned: Plan) -> Advice:
    """Advice for the node. Every change makes its open choices again."""
    return Advice(max_kv_ratio=largest_kv_ratio(planned.node), ladder=() if planned.fits else climb(planned))


def backend_plans(planned: Plan) -> dict[str, Plan]:
    """The plan on FSDP2 and on every layout of megatron-core that is not refused, with open choices made again, by name."""
    node, plans = planned.node, dict[str, Plan]()
    num_ranks, spread = node.num_ranks, node.trainer.expert_ranks
    fsdp = {"trainer.megatron": None, "trainer.backend": "fsdp", "trainer.expert_parallel": 1 < spread == num_ranks}
    layouts: dict[str, dict[str, object]] = {"fsdp": fsdp}
    for size in (size for size in range(1, num_ranks + 1) if num_ranks % size == 0):
        keys = {"tensor_parallel": size, "expert_parallel": spread}
        layouts[f"megatron TP {size}"] = {
            "trainer.backend": "megatron",
            "trainer.expert_parallel": False,
            "trainer.megatron": keys,
        }
    for name, values in layouts.items():
        with suppress(InvalidArgument):
            config = changed(node.config, values)
            sized = node_of(config, node.model, gpu_bytes=node.gpu_bytes, host_bytes=node.host_bytes, num_gpus=node.num_gpus)
            plans[name] = plan(choose(replace(sized, strategy=node.strategy)))
    return plans


def climb(planned: Plan) -> tuple[Rung, ...]:
    """The least change that makes it fit, one rung a key; empty if no combination of choices does."""
    rungs: list[Rung] = []
    if planned.node.strategy is not Strategy.STAGED:
        staged = plan(choose(replace(planned.node, strategy=Strategy.STAGED)))
        rungs.append(Rung("strategy", planned.node.strategy, Strategy.STAGED, staged))
        planned = staged
    return tuple(rungs if planned.fits else rungs + _Search(planned).rungs())


class Cost(IntEnum):
    """What a change costs a run."""

    NOTHING = 0
    SPEED = 1
    RESULTS = 2
    """Samples are shorter, or moments rounded."""
    METHOD = 3
    """Adapters are trained instead of all parameters."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A key that may change."""

    cost: Cost
    key: str
    values: tuple[object, ...]
    """Mildest first; None where the value follows from the other choices."""
    saves: bool = False
    """Whether each value never takes more memory of any kind than those before it."""


class _Search:
    """Looks for the least change: the one whose costliest key costs least, then the fewest keys, then the first in `choices`' order."""

    def __init__(self, planned: Plan) -> None:
        self._node, self._choices = planned.node, choices(planned)
        self._plans: dict[frozenset[tuple[str, object]], Plan | None] = {}

    def rungs(self) -> list[Rung]:
        values = next((found for cost in Cost if (found := self._least(cost)) is not None), {})
        fitting, tried, rungs = self._plan(values), dict[str, object](), list[Rung]()
        needed = _needed_by_adapters(self._node) if _LORA in values else {}
        keys = [*needed, *sorted(values, key=lambda key: key != _LORA)]  # serving adapters alone needs some
        for key in keys:
            assert fitting is not None
            tried[key] = value_at(fitting.node.config, key)
            so_far = fitting if len(tried) == len(keys) else plan(choose(self._with(tried)))
            rungs.append(Rung(key, _text(value_at(self._node.config, key)), _text(tried[key]), so_far))
        return rungs

    def _least(self, cost: Cost) -> dict[str, object] | None:
        """The least combination that fits, with no change above `cost`."""
        allowed = [choice for choice in self._choices if choice.cost <= cost]
        all_saved = {choice.key: choice.values[-1] for choice in allowed if choice.saves}
        trades = (values for keys in _subsets([one for one in allowed if not one.saves]) for values in _products(keys))
        if not any(self._fits(values | all_saved) for values in trades):
            return None
        for keys in _subsets(allowed):
            strongest = {choice.key: choice.values[-1] for choice in keys if choice.saves}
            for traded in _products([choice for choice in keys if not choice.saves]):
                # What does not fit with everything saved does not fit with less.
                if self._fits(traded | all_saved) and self._fits(traded | strongest):
                    milder = _products([choice for choice in keys if choice.saves])
                    fitting = next(traded | saved for saved in milder if self._fits(traded | saved))
                    return {choice.key: fitting[choice.key] for choice in keys}
        return None

    def _fits(self, values: dict[str, object]) -> bool:
        planned = self._plan(values)
        return planned is not None and planned.fits

    def _plan(self, values: Mapping[str, object]) -> Plan | None:
        """The plan with other values of keys; None if they are refused or cannot fit."""
        named = frozenset(values.items())
        if named not in self._plans:
            try:
                self._plans[named] = self._planned(values)
            except InvalidArgument:
                self._plans[named] = None
        return self._plans[named]

    def _planned(self, values: Mapping[str, object]) -> Plan | None:
        given = {key: value for key, value in values.items() if value is not None}
        node = self._with(given)
        if not may_fit(node, at_any_ratio=_KV_RATIO in values):
            return None
        planned = plan(choose(node))
        if _KV_RATIO in values and not planned.fits and (ratio := largest_kv_ratio(planned.node)) is not None:
            given[_KV_RATIO] = ratio
            planned = plan(choose(self._with(given)))
        if _BUDGET in values and not planned.fits_budget:
            planned = plan(choose(self._with(given | {_BUDGET: planned.budget_peak.tag_bytes})))
        return planned

    def _with(self, values: Mapping[str, object]) -> Node:
        node = self._node
        config = changed(node.config, {**_needed_by_adapters(node), **values} if _LORA in values else values)
        return node_of(config, node.model, gpu_bytes=node.gpu_bytes, host_bytes=node.host_bytes, num_gpus=node.num_gpus)


def _needed_by_adapters(node: Node) -> dict[str, object]:
    """Other keys that change with all parameters trained to adapters."""
    layers = [node.model.linear_layers(index) for index in range(node.model.num_layers)]
    targets = [name for name in layers[0] if all(name in each for each in layers)]
    needed = {"trainer.reference_on_host": None, "trainer.param_dtype": "float32"}
    changing: dict[str, object] = {key: value for key, value in needed.items() if value_at(node.config, key) != value}
    return changing if set(LoraConfig().target_modules) <= set(targets) else changing | {"trainer.lora.target_modules": targets}


def _subsets(allowed: Sequence[Choice]) -> Iterator[tuple[Choice, ...]]:
    """Sets of choices with different keys, smallest first."""
    for num in range(len(allowed) + 1):
        for keys in combinations(allowed, num):
            if len({choice.key for choice in keys}) == num:
                yield keys


def _products(keys: Sequence[Choice]) -> Iterator[dict[str, object]]:
    for values in product(*(choice.values for choice in keys)):
        yield dict(zip((choice.key for choice in keys), values, strict=True))


def _text(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, tuple | list):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def choices(planned: Plan) -> list[Choice]:
    """Every change that the planner tries, cheapest first; those that conflict with others are refused when they are tried."""
    node, is_gpu = planned.node, planned.node.device == "cuda"
    config, trainer, rollout = node.config, node.trainer, node.config.rollout
    sample, least = longest_sample(config), max(MIN_TOKENS, 0 if config.train is None else config.train.max_new_tokens + 1)
    requests, at_once = running_requests(config), samples_at_once(config) or _FEW_REQUESTS
    is_free = samples_at_once(config) is not None
    known = is_free and config.train is not None and config.train.max_prompt_tokens is not None and sample is not None
    lengths = (sample,) if known else _halves(node.longest_sequence, least=least)
    tokens = 0 if is_gpu and trainer.micro_batch_tokens is None else node.micro_batch_tokens
    ranks = _halves(node.num_ranks, least=1) if not is_gpu else (node.num_gpus,) if trainer.devices is None else ()
    rungs = (
        () if trainer.checkpointing == "auto" else tuple(rung.value for rung in Checkpointing if rung is not node.checkpointing)
    )
    every = [
        Choice(Cost.NOTHING, _BUDGET, (None,) if config.memory.host_budget_bytes is not None else (), saves=True),
        Choice(Cost.NOTHING, _KV_RATIO, (None,) if is_gpu else (), saves=True),
        Choice(Cost.NOTHING if known else Cost.RESULTS, "rollout.context_length", lengths, saves=True),
        Choice(Cost.NOTHING, "rollout.lora", ("adapter",) if rollout.lora == "merged" else ()),
        Choice(Cost.SPEED, "trainer.num_ranks", ranks),
        Choice(Cost.SPEED, "trainer.checkpointing", rungs),
        Choice(Cost.SPEED, "trainer.reference_on_host", (True,) if node.has_reference else ()),
        Choice(Cost.SPEED, "trainer.moments", ("host", "gpu") if is_gpu else ()),
        Choice(
            Cost.SPEED, "trainer.micro_batch_tokens", _halves(tokens, least=rollout.context_length or MIN_TOKENS), saves=True
        ),
        *(_fsdp_layout(node) if node.gathers_layers else _megatron_layout(node)),
        Choice(Cost.SPEED, "rollout.dp_size", _halves(rollout.dp_size or 1, least=1)),
        Choice(Cost.SPEED, "rollout.tp_size", _doubles(node.tp_size, most=node.num_gpus) if is_gpu else ()),
        Choice(Cost.SPEED, "rollout.engine.disable_cuda_graph", (True,) if is_gpu else (), saves=True),
        Choice(
            Cost.NOTHING if is_free else Cost.SPEED,
            "rollout.max_running_requests",
            (at_once,) * (at_once < requests),
            saves=True,
        ),
        Choice(Cost.RESULTS, "trainer.moments", ("8bit",)),
        Choice(Cost.METHOD, _LORA, (32,) if trainer.lora is None else ()),
    ]
    kept = [replace(one, values=tuple(v for v in one.values if v != value_at(config, one.key))) for one in every]
    return sorted((choice for choice in kept if choice.values), key=lambda choice: choice.cost)


def _fsdp_layout(node: Node) -> list[Choice]:
    sizes = _doubles(node.trainer.sequence_parallel, most=node.num_ranks)
    return [
        Choice(Cost.SPEED, "trainer.sequence_parallel", sizes),
        Choice(Cost.SPEED, "trainer.expert_parallel", (True,) if node.model.num_experts else ()),
    ]


def _megatron_layout(node: Node) -> list[Choice]:
    sizes = {"tensor_parallel": node.trainer.tensor_parallel} | (
        {"expert_parallel": node.trainer.expert_ranks} if node.model.num_experts else {}
    )
    return [Choice(Cost.SPEED, f"trainer.megatron.{key}", _doubles(size, most=node.num_ranks)) for key, size in sizes.items()]


def _halves(value: int, *, least: int) -> tuple[int, ...]:
    """Half of it, a quarter, ..., but none below `least`."""
    return tuple(value >> power for power in range(1, value.bit_length()) if value >> power >= least)


def _doubles(value: int, *, most: int) -> tuple[int, ...]:
    return tuple(value << power for power in range(1, most.bit_length()) if value << power <= most)


def largest_kv_ratio(node: Node) -> float | None:
    """Finds the ratio by bisection: a larger cache never takes less memory or holds shorter sequences. None on a CPU."""

    def plan_with(hundredths: int) -> Plan:
        again = replace(node, config=changed(node.config, {"rollout.kv_ratio": hundredths / _RATIO_STEPS}))
        return plan(replace(again, staying=decide(again)))

    def is_too_large(hundredths: int) -> bool:
        tried = plan_with(hundredths)
        return not (tried.fits_gpu and tried.fits_host)

    if node.device == "cpu" or is_too_large(1):
        return None
    hundredths = bisect_left(range(1, _RATIO_STEPS), True, key=is_too_large)
    return hundredths / _RATIO_STEPS if plan_with(hundredths).fits else None
