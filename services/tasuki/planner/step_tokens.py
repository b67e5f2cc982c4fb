"""Chooses tokens per micro-batch, and activation checkpointing, where the configuration leaves them open."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from tasuki.planner.layout import Checkpointing, Layout
from tasuki.planner.plan import Plan, plan

MIN_TOKENS = 1024
_SURE = 0.95


def most_tokens(layout: Layout) -> int:
    """The largest of `layout.micro_batch_tokens`, its half, its quarter, ... with which no stage lacks memory that fewer tokens would save.

    At least MIN_TOKENS, and at least the longest sequence if one is set, since longer samples are refused.
    """
    ladder, least = [layout.micro_batch_tokens], max(MIN_TOKENS, layout.context_length or 0)
    while ladder[-1] // 2 >= least:
        ladder.append(ladder[-1] // 2)
    fewest = plan(replace(layout, micro_batch_tokens=ladder[-1]))
    plans = (plan(replace(layout, micro_batch_tokens=tokens)) for tokens in ladder)
    return next(tried.layout.micro_batch_tokens for tried in plans if _lacks_nothing_more(tried, than=fewest))


def fastest_checkpointing(layout: Layout) -> Checkpointing:
    """The first choice with which everything fits, else the first with the smallest shortage."""
    return min(Checkpointing, key=lambda rung: _lacking_bytes(plan(replace(layout, checkpointing=rung))))


def with_fastest_checkpointing(layout: Layout) -> Layout:
    """Applies fastest_checkpointing and, where layers are recomputed, keeps as many layers as fit.

    A twentieth of the GPU stays free of kept layers, in line with the accuracy of predictions (docs/benchmarks.md).
    """
    chosen = replace(layout, checkpointing=fastest_checkpointing(layout))
    if chosen.checkpointing is Checkpointing.NONE or layout.device == "cpu":
        return chosen
    wary = replace(chosen, gpu_bytes=max(1, int(_SURE * layout.gpu_bytes)))
    least = _lacking_bytes(plan(wary))
    numbers = range(1, layout.model.num_layers + 1)
    kept = bisect_left(numbers, True, key=lambda kept: _lacking_bytes(plan(replace(wary, kept_layers=kept))) > least)
    return replace(chosen, kept_layers=kept)


def with_last_layer_kept(layout: Layout) -> Layout:
    """Keeps all of the last layer on a GPU, if no stage needs more memory for it: backward recomputes it before any other."""
    if layout.checkpointing is Checkpointing.NONE or layout.device == "cpu" or layout.kept_layers:
        return layout
    kept = replace(layout, kept_layers=1)
    is_free = all(one.gpu_bytes <= other.gpu_bytes for one, other in zip(plan(kept).stages, plan(layout).stages, strict=True))
    return kept if is_free else layout


def _lacking_bytes(tried: Plan) -> int:
    """Missing bytes over all stages, on a GPU and on the host."""
    layout = tried.layout
    gpu_room, host_room = layout.gpu_bytes - layout.overheads.margin, layout.host_bytes - layout.overheads.margin
    of_gpu = 0 if layout.device == "cpu" else sum(max(0, stage.gpu_bytes - gpu_room) for stage in tried.stages)
    return of_gpu + sum(max(0, stage.host_bytes - host_room) for stage in tried.stages)


def _lacks_nothing_more(tried: Plan, *, than: Plan) -> bool:
    layout = tried.layout
    gpu_room, host_room = layout.gpu_bytes - layout.overheads.margin, layout.host_bytes - layout.overheads.margin
    return all(
        one.gpu_bytes <= max(gpu_room, other.gpu_bytes) and one.host_bytes <= max(host_room, other.host_bytes)
        for one, other in zip(tried.stages, than.stages, strict=True)
    )
