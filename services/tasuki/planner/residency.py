"""Decides what stays on each GPU during the other phase: of all choices that fit, the one whose release costs least."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

from tasuki.config.gpus import gpus_of
from tasuki.config.residency_schema import ResidencyConfig
from tasuki.config.schema import NodeConfig
from tasuki.planner.layout import RESIDENT, Layout, Part, Strategy
from tasuki.planner.plan import PLAN_STAGES, Sizes, parts_on_gpu, plan_of, sizes_of
from tasuki.planner.seconds import release_seconds

# Share of a GPU reserved for errors in the prediction of a stage (docs/benchmarks.md: 4.3 % of the stage at worst).
_RESERVE = 0.04
_OF_TRAINER = {
    "weights": Part.TRAINER_WEIGHTS,
    "gradients": Part.GRADIENTS,
    "optimizer": Part.OPTIMIZER,
    "export": Part.EXPORT,
    "cache": Part.TORCH_CACHE,
}
_OF_ENGINE = {"weights": Part.ROLLOUT_WEIGHTS, "kv_cache": Part.KV_CACHE}

Staying = tuple[frozenset[Part], ...]
"""Parts that stay, for each GPU; on a CPU for each rank."""


def decide(layout: Layout, *, export_stays: bool | None) -> Staying:
    """Decides what stays on each GPU of a staged layout: as much as possible, and the most expensive to move first.

    export_stays: whether what rollout reads must stay or must leave; None leaves it open.
    """
    sizes = sizes_of(layout)
    if layout.strategy is not Strategy.STAGED:
        return (frozenset(),) * layout.num_gpus
    if layout.device == "cpu":
        staying = _on_host(layout, sizes, export_stays=export_stays)
        return tuple(_present_on(layout, index) & staying for index in range(layout.num_gpus))
    staying = _on_gpus(layout, sizes, export_stays=export_stays)
    # Parameters that leave although the engine could read them in place leave room for a larger cache.
    grown = sizes_of(replace(layout, staying=staying))
    return staying if grown.kv_pool.num_bytes <= sizes.kv_pool.num_bytes else _on_gpus(layout, grown, export_stays=export_stays)


def _on_gpus(layout: Layout, sizes: Sizes, *, export_stays: bool | None) -> Staying:
    kinds: dict[tuple[bool, bool], frozenset[Part]] = {}
    for index in range(layout.num_gpus):
        kind = layout.has_rank(index), layout.has_engine(index)
        if kind not in kinds:
            kinds[kind] = _on_gpu(layout, sizes, index, export_stays=export_stays)
    return tuple(kinds[layout.has_rank(index), layout.has_engine(index)] for index in range(layout.num_gpus))


def decided_again(layout: Layout) -> Layout:
    """The layout of GPUs with what stays decided again, after a change of other settings; others, which decided nothing, as they are."""
    if layout.staying is None or layout.device == "cpu":
        return replace(layout, staying=None)
    is_open = replace(layout, staying=None)
    return replace(layout, staying=decide(is_open, export_stays=True if layout.export_stays else None))


def given(layout: Layout, config: NodeConfig, residency: ResidencyConfig) -> Staying:
    """Residency that the configuration sets explicitly, and what never leaves."""
    gpus = gpus_of(config)
    never_leaves = _must_stay(layout, export_stays=None)
    staying = [set[Part]() for _ in range(layout.num_gpus)]
    for rank, gpu in enumerate(gpus.trainer):
        staying[gpu] |= {_OF_TRAINER[name] for name in residency.of_trainer(rank)}
    for rank, gpu in enumerate(gpus.rollout):
        staying[gpu] |= {_OF_ENGINE[name] for name in residency.of_rollout(rank)} | never_leaves
    return tuple(map(frozenset, staying))


def as_config(layout: Layout, config: NodeConfig, *, kv_tokens: int | None, starts_together: bool = False) -> ResidencyConfig:
    """Converts a layout's `staying` to the node's configuration, by rank."""
    assert layout.staying is not None
    gpus = gpus_of(config)
    trainer = tuple(_names(layout.staying[gpu], _OF_TRAINER) for gpu in gpus.trainer)
    rollout = tuple(_names(layout.staying[gpu], _OF_ENGINE) for gpu in gpus.rollout)
    return ResidencyConfig.model_validate(
        {"trainer": trainer, "rollout": rollout, "kv_tokens": kv_tokens, "starts_together": starts_together}
    )


def stay_and_leave(layout: Layout) -> list[tuple[str, list[Part], list[Part]]]:
    """Groups GPUs that keep the same: a name, such as "GPUs 0, 1", what stays and what leaves. Empty if undecided."""
    if layout.staying is None:
        return []
    kinds: dict[tuple[frozenset[Part], frozenset[Part]], list[int]] = {}
    for index, staying in enumerate(layout.staying):
        present = _present_on(layout, index) - _absent(layout)
        kinds.setdefault((present & staying, present - staying), []).append(index)
    noun = "rank" if layout.device == "cpu" else "GPU"
    return [
        (_run_name(noun, indices), [part for part in RESIDENT if part in stays], [part for part in RESIDENT if part in leaves])
        for (stays, leaves), indices in kinds.items()
    ]


def _run_name(noun: str, indices: list[int]) -> str:
    """A name as in "GPU 0", "GPUs 0, 2" or "ranks 1-7"."""
    if len(indices) == 1:
        return f"{noun} {indices[0]}"
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return f"{noun}s {', '.join(_numbers(run) for run in runs)}"


def _numbers(run: list[int]) -> str:
    """Successive numbers; three or more as a range."""
    return f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))


def _absent(layout: Layout) -> frozenset[Part]:
    return frozenset({Part.EXPORT}) if layout.exports_parameters and layout.device == "cuda" else frozenset()


def _names(staying: frozenset[Part], names: dict[str, Part]) -> tuple[str, ...]:
    return tuple(name for name, part in names.items() if part in staying)


def _on_gpu(layout: Layout, sizes: Sizes, index: int, *, export_stays: bool | None) -> frozenset[Part]:
    room = layout.gpu_bytes * (1 - _RESERVE) - layout.overheads.margin
    present = _present_on(layout, index)

    def fits(staying: frozenset[Part]) -> bool:
        one = _keeping(layout, staying)
        return all(sum(parts_on_gpu(one, sizes, stage, index).values()) <= room for stage in PLAN_STAGES)

    return _cheapest(layout, sizes, present, fits, export_stays=export_stays)


def _on_host(layout: Layout, sizes: Sizes, *, export_stays: bool | None) -> frozenset[Part]:
    """Decides for all ranks alike, since they share one memory."""
    present = frozenset(RESIDENT) - {Part.TORCH_CACHE}

    def fits(staying: frozenset[Part]) -> bool:
        planned = plan_of(_keeping(layout, staying), sizes)
        return planned.fits_host if layout.budget_bytes is None else planned.fits_budget

    return _cheapest(layout, sizes, present, fits, export_stays=export_stays)


def _cheapest(
    layout: Layout,
    sizes: Sizes,
    present: frozenset[Part],
    fits: Callable[[frozenset[Part]], bool],
    *,
    export_stays: bool | None,
) -> frozenset[Part]:
    """The part of `present` that stays; only what must stay if no choice fits."""
    must_stay = _must_stay(layout, export_stays=export_stays) & present
    choices = sorted(_choices(layout, present, export_stays=export_stays), key=lambda released: _seconds(released, sizes))
    return next((present - released for released in choices if fits(present - released)), must_stay)


def _choices(layout: Layout, present: frozenset[Part], *, export_stays: bool | None) -> Iterator[frozenset[Part]]:
    """Sets of parts that may leave."""
    must_stay = _must_stay(layout, export_stays=export_stays)
    published = {Part.TRAINER_WEIGHTS, Part.EXPORT} if layout.exports_parameters else {Part.EXPORT}
    open_parts = sorted(present - must_stay)
    for count in range(len(open_parts) + 1):
        for chosen in combinations(open_parts, count):
            released = frozenset(chosen)
            # Parameters read in place leave with everything else that is read.
            is_whole = not released & published or published & present <= released
            if is_whole and (export_stays is not False or published & present <= released):
                yield released


def _must_stay(layout: Layout, *, export_stays: bool | None) -> frozenset[Part]:
    staying: set[Part] = set()
    if export_stays:
        staying |= {Part.EXPORT, Part.TRAINER_WEIGHTS} if layout.exports_parameters else {Part.EXPORT}
    if layout.lora_rank is not None and not layout.merges_adapters:
        staying.add(Part.ROLLOUT_WEIGHTS)  # the engine's base weights are never sent again
    return frozenset(staying)


def _present_on(layout: Layout, index: int) -> frozenset[Part]:
    parts: set[Part] = set()
    if layout.has_rank(index):
        parts |= set(_OF_TRAINER.values())
    if layout.has_engine(index):
        parts |= set(_OF_ENGINE.values())
    return frozenset(parts) - ({Part.TORCH_CACHE} if layout.device == "cpu" else frozenset())


def _keeping(layout: Layout, staying: frozenset[Part]) -> Layout:
    """The layout of a GPU that keeps `staying`."""
    return replace(layout, staying=(staying,) * layout.num_gpus).on_gpu(0)


def _seconds(released: frozenset[Part], sizes: Sizes) -> float:
    known = {**sizes.trainer, **sizes.engine, Part.TORCH_CACHE: sum(sizes.work.values())}
    return sum(release_seconds(part, known[part], frozen=sizes.frozen) for part in released)
