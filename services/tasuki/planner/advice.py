"""Which settings to change if a plan does not fit. Every answer comes from planning again with the change, never from a rule of thumb."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tasuki.config.load import changed, value_at
from tasuki.planner.choose import MIN_TOKENS, choose
from tasuki.planner.kv_tokens import running_requests
from tasuki.planner.node import Checkpointing, Node, Strategy, node_of
from tasuki.planner.plan import Plan, plan
from tasuki.planner.residency import decide
from tasuki.planner.seconds import expected_seconds, stages_to
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.stages import Phase

_RATIO_STEPS = 100
_FEW_REQUESTS = 64


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
    """Changes that help, in the order to try them, up to the one that makes it fit; empty if it already fits."""

    @property
    def solves(self) -> bool:
        return bool(self.ladder) and self.ladder[-1].plan.fits


def advise(planned: Plan) -> Advice:
    """Advice for the node. Every change makes its open choices again."""
    return Advice(max_kv_ratio=largest_kv_ratio(planned.node), ladder=() if planned.fits else climb(planned))


def changeovers_ms(planned: Plan) -> tuple[str, str]:
    """Expected time of the changeovers to ROLLOUT and to TRAIN, for a user."""
    seconds = expected_seconds(planned)
    there, back = (sum(seconds[stage] for stage in stages_to(phase)) for phase in (Phase.ROLLOUT, Phase.TRAIN))
    return f"{1000 * there:.0f} ms", f"{1000 * back:.0f} ms"


def climb(planned: Plan) -> tuple[Rung, ...]:
    """Applies changes for what is short, one on top of the other; until everything fits or none helps."""
    rungs: list[Rung] = []
    if (
        planned.node.strategy is not Strategy.STAGED
        and (staged := _with(planned.node, {}, strategy=Strategy.STAGED)) is not None
    ):
        rungs.append(Rung("strategy", planned.node.strategy, Strategy.STAGED, staged))
        planned = staged
    while not planned.fits and (rung := _next_rung(planned)) is not None:
        rungs.append(rung)
        planned = rung.plan
    return tuple(rungs)


def _next_rung(planned: Plan) -> Rung | None:
    """The first change that makes it fit, else the one that helps most; adapters only if nothing else helps."""
    best: Rung | None = None
    for key, value in (*_changes(planned), ("trainer.lora.rank", 32)):
        if key == "trainer.lora.rank" and (best is not None or planned.node.lora is not None):
            return best
        tried = _with(planned.node, {key: value})
        if tried is None or _shortage(tried) >= _shortage(planned if best is None else best.plan):
            continue
        best = Rung(key, _text(value_at(planned.node.config, key)), _text(value), tried)
        if tried.fits:
            return best
    return best


def _text(value: object) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _with(node: Node, values: Mapping[str, object], *, strategy: Strategy | None = None) -> Plan | None:
    """The plan with other values of keys; None if they are refused."""
    try:
        again = node_of(
            changed(node.config, values),
            node.model,
            gpu_bytes=node.gpu_bytes,
            host_bytes=node.host_bytes,
            num_gpus=node.num_gpus,
            strategy=strategy or node.strategy,
        )
        return plan(choose(again))
    except InvalidArgument:
        return None


def _changes(planned: Plan) -> Iterator[tuple[str, object]]:
    """Keys and values to try, least costly first; those that conflict with others are refused when they are tried."""
    node = planned.node
    trainer, rollout = node.trainer, node.config.rollout
    if not planned.fits_budget:
        yield "memory.host_budget_bytes", planned.budget_peak.tag_bytes
    if trainer.checkpointing != "auto":
        yield from (("trainer.checkpointing", rung.value) for rung in Checkpointing if rung is not node.checkpointing)
    if node.has_reference:
        yield "trainer.reference_on_host", True
    yield from (("trainer.moments", moments) for moments in ("host", "gpu") if trainer.moments not in ("8bit", moments))
    tokens = node.micro_batch_tokens if node.device == "cpu" or trainer.micro_batch_tokens is not None else 0
    while (tokens := tokens // 2) >= (rollout.context_length or MIN_TOKENS):
        yield "trainer.micro_batch_tokens", tokens
    if (ratio := largest_kv_ratio(node)) is not None:
        yield "rollout.kv_ratio", ratio
    yield "trainer.sequence_parallel", 2 * trainer.sequence_parallel
    if not trainer.expert_parallel:
        yield "trainer.expert_parallel", True
    if not rollout.engine.get("disable_cuda_graph"):
        yield "rollout.engine.disable_cuda_graph", True
    if (requests := running_requests(node.config)) > _FEW_REQUESTS:
        yield "rollout.max_running_requests", max(_FEW_REQUESTS, requests // 4)
    yield "rollout.tp_size", 2 * node.tp_size
    if planned.kv_pool.num_tokens >= MIN_TOKENS:
        yield "rollout.context_length", min(planned.kv_pool.num_tokens, node.longest_sequence - 1)
    if node.num_ranks < node.num_gpus:
        yield "trainer.num_ranks", node.num_gpus


def _shortage(planned: Plan) -> int:
    """Missing bytes and tokens; 0 if it fits."""
    node, budget = planned.node, planned.node.config.memory.host_budget_bytes
    over_budget = 0 if budget is None else max(0, planned.budget_peak.tag_bytes - budget)
    missing = max(0, node.longest_sequence - planned.kv_pool.num_tokens)
    return planned.lacking(planned.gpu_peak)[0] + planned.lacking(planned.host_peak)[1] + over_budget + missing


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
