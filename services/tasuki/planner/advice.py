"""Conclusions from a plan: the least that must leave, the largest KV cache, and which settings to change if it does not fit.

Every answer comes from planning again with the change, never from a rule of thumb.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from tasuki.memory.stages import Phase
from tasuki.planner.layout import TAGS, Checkpointing, Layout, Part, Strategy, gb, unshared_experts, unshared_heads
from tasuki.planner.plan import SERVING, TRAINER_TAGS, Plan, plan
from tasuki.planner.residency import decided_again
from tasuki.planner.step_tokens import MIN_TOKENS

_RATIO_STEPS = 100
_LORA_RANK = 32


@dataclass(frozen=True, slots=True)
class Rung:
    """One changed setting, on top of those before it, and the resulting plan."""

    setting: str
    """The node's key, or what it would be if there is none yet."""
    old: str
    new: str
    is_available: bool
    """Whether this release supports the setting."""
    plan: Plan


@dataclass(frozen=True, slots=True)
class Advice:
    """Answers for one plan."""

    must_leave: frozenset[Part] | None
    """The smallest set of tags, by bytes, that must leave; None if no choice suffices."""
    max_kv_ratio: float | None
    """Largest ratio, in hundredths, at which everything fits; None if none."""
    ladder: tuple[Rung, ...]
    """Changes that help, in the order to try them, up to the one that makes it fit; empty if it already fits."""

    @property
    def solves(self) -> bool:
        return bool(self.ladder) and self.ladder[-1].plan.fits


def advise(planned: Plan) -> Advice:
    """Advice for the layout. Where what stays was decided, every change decides it again."""
    layout = planned.layout
    return Advice(
        must_leave=smallest_sleeping(replace(layout, staying=None)),
        max_kv_ratio=largest_kv_ratio(layout),
        ladder=() if planned.fits else climb(planned),
    )


def problems(planned: Plan) -> list[str]:
    """Why the plan does not fit."""
    layout = planned.layout
    margin = layout.overheads.margin
    reasons: list[str] = []
    if not planned.fits_gpu:
        over = planned.gpu_peak.gpu_bytes + margin - layout.gpu_bytes
        reasons.append(f"a GPU lacks {gb(over)} GB in {planned.gpu_peak.stage}")
    if not planned.fits_host:
        over = planned.host_peak.host_bytes + margin - layout.host_bytes
        reasons.append(f"the host lacks {gb(over)} GB in {planned.host_peak.stage}")
    if not planned.has_room_for_a_sequence:
        tokens, longest = planned.kv_pool.num_tokens, layout.longest_sequence
        reasons.append(f"the KV cache holds {tokens:,} tokens and a sequence may have {longest:,}")
    return reasons


def smallest_sleeping(layout: Layout) -> frozenset[Part] | None:
    """Choice of tags that fits and moves the fewest bytes on the busiest GPU; None if none fits."""
    if layout.strategy is Strategy.RESIDENT or layout.device == "cpu":
        return frozenset() if plan(layout).fits else None
    best: tuple[int, frozenset[Part]] | None = None
    for size in range(len(TAGS) + 1):
        for chosen in combinations(TAGS, size):
            sleeping = frozenset(chosen)
            tried = plan(replace(layout, sleeping=sleeping, released_early=layout.released_early & sleeping))
            moved = _moved_bytes(tried)
            if tried.fits and (best is None or moved < best[0]):
                best = moved, sleeping
    return None if best is None else best[1]


def largest_kv_ratio(layout: Layout) -> float | None:
    """Finds the ratio by bisection: a larger cache never takes less memory or holds shorter sequences."""

    def is_too_large(hundredths: int) -> bool:
        tried = _plan_again(replace(layout, kv_ratio=hundredths / _RATIO_STEPS))
        return not (tried.fits_gpu and tried.fits_host)

    ratio = bisect_left(range(1, _RATIO_STEPS), True, key=is_too_large) / _RATIO_STEPS
    return ratio if ratio > 0 and _plan_again(replace(layout, kv_ratio=ratio)).fits else None


def climb(planned: Plan) -> tuple[Rung, ...]:
    """Applies changes for what is short, one on top of the other; keeps those that help, until everything fits.

    Where the configuration gives what stays, the planner's own decision comes first: a change may be enough only with it.
    """
    rungs: list[Rung] = []
    decided = _plan_again(planned.layout)
    if decided.layout.staying != planned.layout.staying and not planned.fits:
        rungs.append(Rung("residency", "as given", "removed", True, decided))
        planned = decided
    while not planned.fits and (rung := _next_rung(planned)) is not None:
        rungs.append(rung)
        planned = rung.plan
    return tuple(rungs)


def _next_rung(planned: Plan) -> Rung | None:
    """The first change that makes it fit, else the first that reduces the shortage; supported settings come first."""
    rungs = [
        Rung(change.setting, change.old, change.new, change.is_available, _plan_again(change.layout))
        for change in _changes(planned)
    ]
    for is_enough in (lambda rung: rung.plan.fits, lambda rung: _shortage(rung.plan) < _shortage(planned)):
        for is_available in (True, False):
            for rung in rungs:
                if rung.is_available is is_available and is_enough(rung):
                    return rung
    return None


def _plan_again(layout: Layout) -> Plan:
    return plan(decided_again(layout))


@dataclass(frozen=True, slots=True)
class _Change:
    setting: str
    old: str
    new: str
    layout: Layout
    is_available: bool = True


def _changes(planned: Plan) -> Iterator[_Change]:
    """Possible changes for where memory is short, least costly first; then for the other places, which share the memory."""
    layout, peak = planned.layout, planned.gpu_peak.stage
    if planned.stage(Phase.TRAIN).gpu_bytes + layout.overheads.margin > layout.gpu_bytes:
        peak = Phase.TRAIN
    if layout.strategy is not Strategy.STAGED and not planned.fits_gpu:
        yield _Change("strategy", layout.strategy, Strategy.STAGED, replace(layout, strategy=Strategy.STAGED))
    if not planned.fits_gpu:
        ladders = [_for_rollout, _for_training, _for_changeover]
        first = _for_training if peak is Phase.TRAIN else _for_rollout if peak in SERVING else _for_changeover
        for ladder in sorted(ladders, key=lambda ladder: ladder is not first):
            yield from ladder(layout)
    if not planned.fits_host:
        yield from _for_host(layout)
    if not planned.has_room_for_a_sequence:
        yield from _for_cache(planned)


def _for_training(layout: Layout) -> Iterator[_Change]:
    if not layout.reshards_after_forward:
        yield _Change("trainer.reshard_after_forward", "false", "true", replace(layout, reshards_after_forward=True))
    yield from _more_checkpointing(layout)
    yield from _reference_on_host(layout)
    yield from _optimizer_on_host(layout)
    yield from _export_leaves(layout)
    yield from _export_in_place(layout)
    yield from _fewer_tokens(layout)
    yield from _shared_sequences(layout)
    yield from _parallel_experts(layout)
    yield from _sleeping(layout, layout.sleeping | {Part.ROLLOUT_WEIGHTS, Part.KV_CACHE})
    if layout.num_ranks < layout.num_gpus and layout.rank_gpus is None:
        yield _Change(
            "trainer.num_ranks", str(layout.num_ranks), str(layout.num_gpus), replace(layout, num_ranks=layout.num_gpus)
        )
    if layout.lora_rank is None:
        changed = replace(layout, lora_rank=_LORA_RANK, exports_parameters=False)
        yield _Change("trainer.lora.rank", "none", str(_LORA_RANK), changed)


def _for_rollout(layout: Layout) -> Iterator[_Change]:
    yield from _export_leaves(layout)
    if (ratio := largest_kv_ratio(layout)) is not None and ratio < layout.kv_ratio:
        yield _Change("rollout.kv_ratio", f"{layout.kv_ratio:g}", f"{ratio:g}", replace(layout, kv_ratio=ratio))
    if layout.has_cuda_graphs and layout.device == "cuda":
        yield _Change("rollout.engine.disable_cuda_graph", "false", "true", replace(layout, has_cuda_graphs=False))
    if layout.max_running_requests > 1:
        fewer = max(1, layout.max_running_requests // 4)
        changed = replace(layout, max_running_requests=fewer)
        yield _Change("rollout.max_running_requests", str(layout.max_running_requests), str(fewer), changed)
    yield from _sleeping(layout, layout.sleeping | set(TRAINER_TAGS))
    yield from _wider_engines(layout)


def _for_changeover(layout: Layout) -> Iterator[_Change]:
    if not layout.empties_cache:
        yield _Change("trainer.empty_cache_early", "false", "true", replace(layout, empties_cache=True))
    early = frozenset({Part.GRADIENTS, Part.OPTIMIZER}) & layout.sleeping
    if layout.strategy is Strategy.STAGED and not early <= layout.released_early:
        changed = replace(layout, released_early=layout.released_early | early)
        yield _Change(
            "leave before LOAD_WEIGHTS", _names(layout.released_early), _names(changed.released_early), changed, False
        )
    yield from _export_in_place(layout)
    yield from _fewer_tokens(layout)
    yield from _reference_on_host(layout)
    yield from _optimizer_on_host(layout)
    yield from _wider_engines(layout)


def _for_host(layout: Layout) -> Iterator[_Change]:
    if layout.preloaded_bytes:
        yield _Change("model.preload", "true", "false", replace(layout, preloaded_bytes=0))
    if layout.optimizer_on_host:
        yield _Change("trainer.optimizer_on_host", "true", "false", replace(layout, optimizer_on_host=False))
    for part in (Part.OPTIMIZER, Part.TRAINER_WEIGHTS):
        yield from _sleeping(layout, layout.sleeping - {part})
    if layout.checkpointing is Checkpointing.OFFLOADED:
        changed = replace(layout, checkpointing=Checkpointing.FULL)
        yield _Change("trainer.checkpointing", layout.checkpointing, changed.checkpointing, changed)
    if layout.device == "cpu":
        yield from _for_training(layout)


def _for_cache(planned: Plan) -> Iterator[_Change]:
    layout, num_tokens = planned.layout, planned.kv_pool.num_tokens
    if num_tokens >= MIN_TOKENS:
        changed = replace(layout, context_length=num_tokens)
        yield _Change("rollout.context_length", str(layout.longest_sequence), str(num_tokens), changed)
    if (ratio := largest_kv_ratio(layout)) is not None and ratio > layout.kv_ratio:
        yield _Change("rollout.kv_ratio", f"{layout.kv_ratio:g}", f"{ratio:g}", replace(layout, kv_ratio=ratio))
    yield from _wider_engines(layout)
    if layout.kv_tokens is not None:
        changed = replace(layout, kv_tokens=layout.longest_sequence)
        yield _Change("rollout.kv_tokens", str(layout.kv_tokens), str(layout.longest_sequence), changed)


def _sleeping(layout: Layout, parts: frozenset[Part]) -> Iterator[_Change]:
    """Lets exactly these tags leave, unless what stays is decided again anyway."""
    if layout.staying is None and layout.sleeping != parts:
        changed = replace(layout, sleeping=parts, released_early=layout.released_early & parts)
        old, new = (f"{_names(frozenset(TAGS) - one)} stays" for one in (layout.sleeping, parts))
        yield _Change("residency", old, new, changed)


def _more_checkpointing(layout: Layout) -> Iterator[_Change]:
    rungs = list(Checkpointing)
    for rung in rungs[rungs.index(layout.checkpointing) + 1 :]:
        yield _Change("trainer.checkpointing", layout.checkpointing, rung, replace(layout, checkpointing=rung, kept_layers=0))


def _reference_on_host(layout: Layout) -> Iterator[_Change]:
    is_possible = layout.has_reference and layout.lora_rank is None and layout.device == "cuda"
    if is_possible and not layout.reference_on_host:
        yield _Change("trainer.reference_on_host", "false", "true", replace(layout, reference_on_host=True))


def _optimizer_on_host(layout: Layout) -> Iterator[_Change]:
    if not layout.optimizer_on_host and layout.device == "cuda":
        yield _Change("trainer.optimizer_on_host", "false", "true", replace(layout, optimizer_on_host=True))


def _export_leaves(layout: Layout) -> Iterator[_Change]:
    if layout.export_stays and layout.sync_bucket_bytes is None and layout.strategy is not Strategy.RESIDENT:
        yield _Change("trainer.export_stays", "true", "false", replace(layout, export_stays=False))


def _export_in_place(layout: Layout) -> Iterator[_Change]:
    if not layout.exports_parameters and layout.param_bytes == layout.engine_bytes and layout.sync_bucket_bytes is None:
        yield _Change("trainer.export", "copy", "parameters", replace(layout, exports_parameters=True))


def _fewer_tokens(layout: Layout) -> Iterator[_Change]:
    """Halves the budget, at most down to the longest sequence if one is set, since longer samples are refused."""
    tokens, least = layout.micro_batch_tokens, layout.context_length or MIN_TOKENS
    while (tokens := tokens // 2) >= least:
        changed = replace(layout, micro_batch_tokens=tokens)
        yield _Change("trainer.micro_batch_tokens", str(layout.micro_batch_tokens), str(tokens), changed)


def _shared_sequences(layout: Layout) -> Iterator[_Change]:
    twice = layout.sequence_parallel * 2
    if layout.num_ranks % twice == 0 and unshared_heads(layout.model, twice) is None:
        changed = replace(layout, sequence_parallel=twice)
        yield _Change("trainer.sequence_parallel", str(layout.sequence_parallel), str(twice), changed)


def _parallel_experts(layout: Layout) -> Iterator[_Change]:
    sparse = [model for model in (layout.model, layout.critic) if model is not None and model.num_experts]
    is_possible = layout.num_ranks > 1 and layout.mlp_tile_tokens is None
    if (
        sparse
        and is_possible
        and not layout.expert_parallel
        and not any(unshared_experts(one, layout.num_ranks) for one in sparse)
    ):
        yield _Change("trainer.expert_parallel", "false", "true", replace(layout, expert_parallel=True))


def _wider_engines(layout: Layout) -> Iterator[_Change]:
    wider = layout.tp_size * 2
    if layout.engine_gpus is None and wider <= layout.num_gpus and layout.model.num_heads % wider == 0:
        changed = replace(layout, tp_size=wider, num_engines=max(1, layout.num_engine_ranks // wider))
        old, new = str(layout.tp_size), str(wider)
        if changed.num_engines != layout.num_engines:  # a node's rollout.dp_size stays as configured
            old, new = (f"{size} (rollout.dp_size {one.num_engines})" for size, one in ((old, layout), (new, changed)))
        yield _Change("rollout.tp_size", old, new, changed)


def _shortage(planned: Plan) -> int:
    """Missing bytes and tokens; 0 if it fits."""
    layout = planned.layout
    gpu = 0 if planned.fits_gpu else planned.gpu_peak.gpu_bytes + layout.overheads.margin - layout.gpu_bytes
    host = 0 if planned.fits_host else planned.host_peak.host_bytes + layout.overheads.margin - layout.host_bytes
    return gpu + host + max(0, layout.longest_sequence - planned.kv_pool.num_tokens)


def _moved_bytes(planned: Plan) -> int:
    """Bytes that leave a GPU in a whole round."""
    sleeping = planned.layout.released | ({Part.CUDA_GRAPH} if Part.KV_CACHE in planned.layout.sleeping else set())
    trained, served = planned.stage(Phase.TRAIN), planned.stage(Phase.ROLLOUT)
    moved: list[int] = []
    for one, other in zip(trained.gpus, served.gpus, strict=True):
        moved.append(sum(size for part, size in one.items() if part in sleeping and part in TRAINER_TAGS))
        moved[-1] += sum(size for part, size in other.items() if part in sleeping and part not in TRAINER_TAGS)
    return max(moved)


def _names(parts: frozenset[Part]) -> str:
    return ", ".join(part for part in TAGS if part in parts) or "nothing"
