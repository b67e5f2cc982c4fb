"""Conclusions from a plan: the least that must leave, the largest KV cache, and which settings to change if it does not fit.

Every answer comes from planning again with the change, never from a rule of thumb.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

from tasuki.planner.changes import changes, largest_kv_ratio, plan_again
from tasuki.planner.layout import TAGS, Layout, Part, Strategy, gb
from tasuki.planner.plan import TRAINER_TAGS, Plan, plan
from tasuki.planner.seconds import expected_seconds, stages_to
from tasuki.wire.stages import Phase


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


def changeovers_ms(planned: Plan) -> tuple[str, str]:
    """Expected time of the changeovers to ROLLOUT and to TRAIN, for a user."""
    seconds = expected_seconds(planned)
    there, back = (sum(seconds[stage] for stage in stages_to(phase)) for phase in (Phase.ROLLOUT, Phase.TRAIN))
    return f"{1000 * there:.0f} ms", f"{1000 * back:.0f} ms"


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
    if not planned.fits_budget:
        peak = planned.budget_peak
        reasons.append(
            f"the tags take {peak.tag_bytes} bytes in {peak.stage}, and memory.host_budget_bytes is {layout.budget_bytes}"
        )
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


def climb(planned: Plan) -> tuple[Rung, ...]:
    """Applies changes for what is short, one on top of the other; keeps those that help, until everything fits."""
    rungs: list[Rung] = []
    planned = plan_again(planned.layout)
    while not planned.fits and (rung := _next_rung(planned)) is not None:
        rungs.append(rung)
        planned = rung.plan
    return tuple(rungs)


def _next_rung(planned: Plan) -> Rung | None:
    """The first change that makes it fit, else the first that reduces the shortage; supported settings come first."""
    rungs = [
        Rung(change.setting, change.old, change.new, change.is_available, plan_again(change.layout))
        for change in changes(planned)
    ]
    for is_enough in (lambda rung: rung.plan.fits, lambda rung: _shortage(rung.plan) < _shortage(planned)):
        for is_available in (True, False):
            for rung in rungs:
                if rung.is_available is is_available and is_enough(rung):
                    return rung
    return None


def _shortage(planned: Plan) -> int:
    """Missing bytes and tokens; 0 if it fits."""
    layout = planned.layout
    gpu = 0 if planned.fits_gpu else planned.gpu_peak.gpu_bytes + layout.overheads.margin - layout.gpu_bytes
    host = 0 if planned.fits_host else planned.host_peak.host_bytes + layout.overheads.margin - layout.host_bytes
    budget = 0 if layout.budget_bytes is None else max(0, planned.budget_peak.tag_bytes - layout.budget_bytes)
    return gpu + host + budget + max(0, layout.longest_sequence - planned.kv_pool.num_tokens)


def _moved_bytes(planned: Plan) -> int:
    """Bytes that leave a GPU in a whole round."""
    sleeping = planned.layout.released | ({Part.CUDA_GRAPH} if Part.KV_CACHE in planned.layout.released else set())
    trained, served = planned.stage(Phase.TRAIN), planned.stage(Phase.ROLLOUT)
    moved: list[int] = []
    for one, other in zip(trained.gpus, served.gpus, strict=True):
        moved.append(sum(size for part, size in one.items() if part in sleeping and part in TRAINER_TAGS))
        moved[-1] += sum(size for part, size in other.items() if part in sleeping and part not in TRAINER_TAGS)
    return max(moved)
