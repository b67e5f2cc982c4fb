"""Settings that may be changed if a plan does not fit, least costly first. `advice` keeps those that help."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tasuki.config.trainer_schema import LoraConfig
from tasuki.planner.kv_tokens import TOKENS_KEY
from tasuki.planner.layout import TAGS, Checkpointing, Layout, Part, Strategy, unshared_experts, unshared_heads
from tasuki.planner.plan import SERVING, TRAINER_TAGS, Plan, plan
from tasuki.planner.residency import decided_again
from tasuki.planner.step_tokens import MIN_TOKENS
from tasuki.wire.stages import Phase

_LORA_RANK = 32
_RATIO_STEPS = 100
_STAYS = "what stays"


@dataclass(frozen=True, slots=True)
class Change:
    """One changed setting, and the layout with it."""

    setting: str
    old: str
    new: str
    layout: Layout
    is_available: bool = True


def _set(layout: Layout, key: str, field: str, value: Any) -> Change:
    """Change of a key of the node to the value of one field of the layout."""
    return Change(key, _text(getattr(layout, field)), _text(value), replace(layout, **{field: value}))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def changes(planned: Plan) -> Iterator[Change]:
    """Possible changes for where memory is short, least costly first; then for the other places, which share the memory."""
    layout, peak = planned.layout, planned.gpu_peak.stage
    if planned.stage(Phase.TRAIN).gpu_bytes + layout.overheads.margin > layout.gpu_bytes:
        peak = Phase.TRAIN
    if layout.strategy is not Strategy.STAGED and not planned.fits_gpu:
        yield Change("strategy", layout.strategy, Strategy.STAGED, replace(layout, strategy=Strategy.STAGED))
    if not planned.fits_gpu:
        ladders = [_for_rollout, _for_training, _for_changeover]
        first = _for_training if peak is Phase.TRAIN else _for_rollout if peak in SERVING else _for_changeover
        for ladder in sorted(ladders, key=lambda ladder: ladder is not first):
            yield from ladder(layout)
    if not planned.fits_host:
        yield from _for_host(layout)
    if not planned.fits_budget:
        yield _set(layout, "memory.host_budget_bytes", "budget_bytes", planned.budget_peak.tag_bytes)
    if not planned.has_room_for_a_sequence:
        yield from _for_cache(planned)


def _for_training(layout: Layout) -> Iterator[Change]:
    yield from _more_checkpointing(layout)
    yield from _reference_on_host(layout)
    yield from _optimizer_on_host(layout)
    yield from _export_leaves(layout)
    yield from _fewer_tokens(layout)
    yield from _shared_sequences(layout)
    yield from _parallel_experts(layout)
    yield from _sleeping(layout, layout.sleeping | {Part.ROLLOUT_WEIGHTS, Part.KV_CACHE})
    if layout.num_ranks < layout.num_gpus and layout.rank_gpus is None:
        yield _set(layout, "trainer.num_ranks", "num_ranks", layout.num_gpus)
    yield from _adapters(layout)


def _for_rollout(layout: Layout) -> Iterator[Change]:
    yield from _export_leaves(layout)
    if (ratio := largest_kv_ratio(layout)) is not None and ratio < layout.kv_ratio:
        yield _set(layout, "rollout.kv_ratio", "kv_ratio", ratio)
    if layout.has_cuda_graphs and layout.device == "cuda":
        yield Change("rollout.engine.disable_cuda_graph", "false", "true", replace(layout, has_cuda_graphs=False))
    if layout.max_running_requests > 1:
        fewer = max(1, layout.max_running_requests // 4)
        yield _set(layout, "rollout.max_running_requests", "max_running_requests", fewer)
    yield from _sleeping(layout, layout.sleeping | set(TRAINER_TAGS))
    yield from _wider_engines(layout)


def _for_changeover(layout: Layout) -> Iterator[Change]:
    early = frozenset({Part.GRADIENTS, Part.OPTIMIZER}) & layout.sleeping
    if layout.strategy is Strategy.STAGED and not early <= layout.released_early:
        changed = replace(layout, released_early=layout.released_early | early)
        yield Change("leave before LOAD_WEIGHTS", _names(layout.released_early), _names(changed.released_early), changed, False)
    yield from _fewer_tokens(layout)
    yield from _reference_on_host(layout)
    yield from _optimizer_on_host(layout)
    yield from _wider_engines(layout)


def _for_host(layout: Layout) -> Iterator[Change]:
    if layout.optimizer_on_host:
        yield Change("trainer.moments", "host", "gpu", replace(layout, optimizer_on_host=False))
    for part in (Part.OPTIMIZER, Part.TRAINER_WEIGHTS):
        yield from _sleeping(layout, layout.sleeping - {part})
    if layout.checkpointing is Checkpointing.OFFLOADED:
        yield _set(layout, "trainer.checkpointing", "checkpointing", Checkpointing.FULL)
    if layout.device == "cpu":
        yield from _for_training(layout)


def _for_cache(planned: Plan) -> Iterator[Change]:
    layout, num_tokens = planned.layout, planned.kv_pool.num_tokens
    if num_tokens >= MIN_TOKENS:
        changed = replace(layout, context_length=num_tokens)
        yield Change("rollout.context_length", str(layout.longest_sequence), str(num_tokens), changed)
    if (ratio := largest_kv_ratio(layout)) is not None and ratio > layout.kv_ratio:
        yield _set(layout, "rollout.kv_ratio", "kv_ratio", ratio)
    yield from _wider_engines(layout)
    if layout.kv_tokens is not None:
        yield _set(layout, TOKENS_KEY, "kv_tokens", layout.longest_sequence)


def _sleeping(layout: Layout, parts: frozenset[Part]) -> Iterator[Change]:
    """Lets exactly these tags leave, unless what stays is decided again anyway."""
    if layout.staying is None and layout.sleeping != parts:
        changed = replace(layout, sleeping=parts, released_early=layout.released_early & parts)
        old, new = (_names(frozenset(TAGS) - one) for one in (layout.sleeping, parts))
        yield Change(_STAYS, old, new, changed)


def _more_checkpointing(layout: Layout) -> Iterator[Change]:
    rungs = list(Checkpointing)
    for rung in rungs[rungs.index(layout.checkpointing) + 1 :]:
        yield Change("trainer.checkpointing", layout.checkpointing, rung, replace(layout, checkpointing=rung, kept_layers=0))


def _reference_on_host(layout: Layout) -> Iterator[Change]:
    is_possible = layout.has_reference and layout.lora_rank is None and layout.device == "cuda"
    if is_possible and not layout.reference_on_host:
        yield _set(layout, "trainer.reference_on_host", "reference_on_host", True)


def _optimizer_on_host(layout: Layout) -> Iterator[Change]:
    if not layout.optimizer_on_host and not layout.optimizer_8bit and layout.device == "cuda":
        yield Change("trainer.moments", "gpu", "host", replace(layout, optimizer_on_host=True))


def _export_leaves(layout: Layout) -> Iterator[Change]:
    """Lets what the engine reads leave, unless what stays is decided again anyway."""
    is_open = layout.staying is None and layout.sync_bucket_bytes is None and layout.strategy is not Strategy.RESIDENT
    if layout.export_stays and is_open:
        yield Change(_STAYS, Part.EXPORT, "nothing published", replace(layout, export_stays=False))


def _fewer_tokens(layout: Layout) -> Iterator[Change]:
    """Halves the budget, at most down to the longest sequence if one is set, since longer samples are refused."""
    tokens, least = layout.micro_batch_tokens, layout.context_length or MIN_TOKENS
    while (tokens := tokens // 2) >= least:
        yield _set(layout, "trainer.micro_batch_tokens", "micro_batch_tokens", tokens)


def _shared_sequences(layout: Layout) -> Iterator[Change]:
    twice = layout.sequence_parallel * 2
    if layout.num_ranks % twice == 0 and unshared_heads(layout.model, twice) is None:
        yield _set(layout, "trainer.sequence_parallel", "sequence_parallel", twice)


def _parallel_experts(layout: Layout) -> Iterator[Change]:
    sparse = [model for model in (layout.model, layout.critic) if model is not None and model.num_experts]
    is_possible = layout.num_ranks > 1 and layout.mlp_tile_tokens is None
    if (
        sparse
        and is_possible
        and not layout.expert_parallel
        and not any(unshared_experts(one, layout.num_ranks) for one in sparse)
    ):
        yield _set(layout, "trainer.expert_parallel", "expert_parallel", True)


def _adapters(layout: Layout) -> Iterator[Change]:
    """Trains adapters alone, with the other keys that a node then needs in the text."""
    linear = [layout.model.linear_layers(index) for index in range(layout.model.num_layers)]
    there = tuple(name for name in linear[0] if all(name in names for names in linear))
    if layout.lora_rank is not None or not there:
        return
    changed = replace(
        layout,
        lora_rank=_LORA_RANK,
        exports_parameters=False,
        reference_on_host=False,
        param_bytes=4,
    )
    others: list[str] = []
    if not set(LoraConfig().target_modules) <= set(there):
        changed = replace(changed, lora_targets=there)
        others.append(f"trainer.lora.target_modules {json.dumps(there)}")
    if layout.reference_on_host:
        others.append("without trainer.reference_on_host")
    if layout.param_bytes != changed.param_bytes:
        others.append("trainer.param_dtype float32")
    new = f"{_LORA_RANK} ({', '.join(others)})" if others else str(_LORA_RANK)
    yield Change("trainer.lora.rank", "none", new, changed)


def _wider_engines(layout: Layout) -> Iterator[Change]:
    wider = layout.tp_size * 2
    if layout.engine_gpus is None and wider <= layout.num_gpus and layout.model.num_heads % wider == 0:
        changed = replace(layout, tp_size=wider, num_engines=max(1, layout.num_engine_ranks // wider))
        old, new = str(layout.tp_size), str(wider)
        if changed.num_engines != layout.num_engines:  # a node's rollout.dp_size stays as configured
            old, new = (f"{size} (rollout.dp_size {one.num_engines})" for size, one in ((old, layout), (new, changed)))
        yield Change("rollout.tp_size", old, new, changed)


def _names(parts: frozenset[Part]) -> str:
    return ", ".join(part for part in TAGS if part in parts) or "nothing"


def largest_kv_ratio(layout: Layout) -> float | None:
    """Finds the ratio by bisection: a larger cache never takes less memory or holds shorter sequences."""

    def is_too_large(hundredths: int) -> bool:
        tried = plan_again(replace(layout, kv_ratio=hundredths / _RATIO_STEPS))
        return not (tried.fits_gpu and tried.fits_host)

    ratio = bisect_left(range(1, _RATIO_STEPS), True, key=is_too_large) / _RATIO_STEPS
    return ratio if ratio > 0 and plan_again(replace(layout, kv_ratio=ratio)).fits else None


def plan_again(layout: Layout) -> Plan:
    """Plan of the layout, with what stays decided again where it was decided before."""
    return plan(decided_again(layout))
