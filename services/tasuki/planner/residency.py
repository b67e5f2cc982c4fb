"""Decides what stays on each GPU during the other phase, the cheapest choice that fits; and whether both services start at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from tasuki.config.choices import Choices
from tasuki.config.gpus import gpus_of
from tasuki.config.schema import NodeConfig
from tasuki.planner.layout import RESIDENT, Layout, Part, Strategy
from tasuki.planner.plan import PLAN_STAGES, Sizes, parts_on_gpu, plan_of, sizes_of
from tasuki.planner.rollout_bytes import MEASURED_FREE
from tasuki.planner.seconds import release_seconds
from tasuki.planner.step_bytes import TRIAL_TOKENS, training_peak
from tasuki.wire.stages import Phase

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


def decide(layout: Layout) -> Staying:
    """Decides what stays on each GPU of a staged layout: as much as possible, and the most expensive to move first."""
    sizes = sizes_of(layout)
    if layout.strategy is not Strategy.STAGED:
        return (frozenset(),) * layout.num_gpus
    if layout.device == "cpu":
        staying = _on_host(layout, sizes)
        return tuple(_present_on(layout, index) & staying for index in range(layout.num_gpus))
    staying = _on_gpus(layout, sizes)
    # Parameters that leave although the engine could read them in place leave room for a larger cache.
    grown = sizes_of(replace(layout, staying=staying))
    return staying if grown.kv_pool.num_bytes <= sizes.kv_pool.num_bytes else _on_gpus(layout, grown)


def _on_gpus(layout: Layout, sizes: Sizes) -> Staying:
    kinds: dict[tuple[bool, bool], frozenset[Part]] = {}
    for index in range(layout.num_gpus):
        kind = layout.has_rank(index), layout.has_engine(index)
        if kind not in kinds:
            kinds[kind] = _on_gpu(layout, sizes, index)
    return tuple(kinds[layout.has_rank(index), layout.has_engine(index)] for index in range(layout.num_gpus))


def decided_again(layout: Layout) -> Layout:
    """The layout of GPUs with what stays decided again, after a change of other settings; others, which decided nothing, as they are."""
    if layout.staying is None or layout.device == "cpu":
        return replace(layout, staying=None)
    return replace(layout, staying=decide(replace(layout, staying=None)))


def given(layout: Layout, config: NodeConfig, choices: Choices) -> Staying:
    """What stays on each GPU by a node's choices, and what never leaves."""
    gpus = gpus_of(config)
    staying = [set[Part]() for _ in range(layout.num_gpus)]
    for rank, gpu in enumerate(gpus.trainer):
        staying[gpu] |= {_OF_TRAINER[name] for name in choices.of_trainer(rank)}
    for rank, gpu in enumerate(gpus.rollout):
        staying[gpu] |= {_OF_ENGINE[name] for name in choices.of_rollout(rank)} | _must_stay(layout)
    return tuple(map(frozenset, staying))


def staying_names(layout: Layout, config: NodeConfig) -> tuple[Any, Any]:
    """The same by rank of trainer and engine, as in Choices."""
    assert layout.staying is not None
    gpus = gpus_of(config)
    trainer = tuple(_names(layout.staying[gpu], _OF_TRAINER) for gpu in gpus.trainer)
    rollout = tuple(_names(layout.staying[gpu], _OF_ENGINE) for gpu in gpus.rollout)
    return trainer, rollout


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


def _on_gpu(layout: Layout, sizes: Sizes, index: int) -> frozenset[Part]:
    room = layout.gpu_bytes * (1 - _RESERVE) - layout.overheads.margin
    present = _present_on(layout, index)

    def fits(staying: frozenset[Part]) -> bool:
        one = _keeping(layout, staying)
        return all(sum(parts_on_gpu(one, sizes, stage, index).values()) <= room for stage in PLAN_STAGES)

    return _cheapest(layout, sizes, present, fits)


def _on_host(layout: Layout, sizes: Sizes) -> frozenset[Part]:
    """Decides for all ranks alike, since they share one memory."""
    present = frozenset(RESIDENT) - {Part.TORCH_CACHE}

    def fits(staying: frozenset[Part]) -> bool:
        planned = plan_of(_keeping(layout, staying), sizes)
        return planned.fits_host if layout.budget_bytes is None else planned.fits_budget

    return _cheapest(layout, sizes, present, fits)


def _cheapest(
    layout: Layout,
    sizes: Sizes,
    present: frozenset[Part],
    fits: Callable[[frozenset[Part]], bool],
) -> frozenset[Part]:
    """The part of `present` that stays; only what must stay if no choice fits."""
    must_stay = _must_stay(layout) & present
    choices = sorted(_choices(layout, present), key=lambda released: _seconds(released, sizes))
    return next((present - released for released in choices if fits(present - released)), must_stay)


def _choices(layout: Layout, present: frozenset[Part]) -> Iterator[frozenset[Part]]:
    """Sets of parts that may leave."""
    must_stay = _must_stay(layout)
    published = {Part.TRAINER_WEIGHTS, Part.EXPORT} if layout.exports_parameters else {Part.EXPORT}
    open_parts = sorted(present - must_stay)
    for count in range(len(open_parts) + 1):
        for chosen in combinations(open_parts, count):
            released = frozenset(chosen)
            # Parameters read in place leave with everything else that is read.
            is_whole = not released & published or published & present <= released
            if is_whole:
                yield released


def _must_stay(layout: Layout) -> frozenset[Part]:
    """The base below an engine's adapters, which is never sent again."""
    is_base = layout.lora_rank is not None and not layout.merges_adapters
    return frozenset({Part.ROLLOUT_WEIGHTS} if is_base else ())


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


def starts_together(layout: Layout) -> bool:
    """Whether the services share no GPU, or every GPU holds both at their largest during a start.

    False where the engine sizes its cache by the memory that is free, and for a base that the engine loads for both; always true
    otherwise on a CPU.
    """
    if layout.device == "cpu" or layout.shares_base or layout.strategy is not Strategy.STAGED:
        return layout.device == "cpu" and not layout.shares_base
    shared = [gpu for gpu in range(layout.num_gpus) if layout.has_rank(gpu) and layout.has_engine(gpu)]
    if not shared:
        return True
    if layout.kv_tokens is None:
        return False
    room = layout.gpu_bytes * (1 - MEASURED_FREE) - layout.overheads.margin
    return all(sum(parts_at_start(layout, gpu).values()) <= room for gpu in shared)


def parts_at_start(layout: Layout, gpu: int) -> Mapping[Part, int]:
    """Bytes on one GPU when both services are at the largest of their first start. A trainer that starts again replays steps."""
    # No step has run: the trainer computes at most the passes that it compiles.
    trial = replace(layout, micro_batch_tokens=(1 + TRIAL_TOKENS) * layout.sequence_parallel)
    sizes = replace(sizes_of(layout), work=training_peak(trial))
    both = replace(layout, strategy=Strategy.RESIDENT, staying=None, export_stays=True)
    return parts_on_gpu(both, sizes, Phase.TRAIN, gpu)
