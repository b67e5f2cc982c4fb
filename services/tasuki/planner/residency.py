"""Decides what stays on each GPU during the other phase: the cheapest choice that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

from tasuki.config.choices import Choices
from tasuki.planner.node import MARGIN, RESIDENT, Node, Part, Staying, Strategy
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


def decide(node: Node) -> Staying:
    """Decides what stays on each GPU: as much as possible, and the most expensive to move first. Nothing if it is not staged."""
    if node.strategy is not Strategy.STAGED:
        return (frozenset(),) * node.num_gpus
    sizes = sizes_of(node)
    if node.device == "cpu":
        staying = _on_host(node, sizes)
        return tuple(_present_on(node, gpu) & staying for gpu in range(node.num_gpus))
    staying = _on_gpus(node, sizes)
    # Parameters that leave although the engine could read them in place leave room for a larger cache.
    grown = sizes_of(replace(node, staying=staying))
    return staying if grown.kv_pool.num_bytes <= sizes.kv_pool.num_bytes else _on_gpus(node, grown)


def _on_gpus(node: Node, sizes: Sizes) -> Staying:
    kinds: dict[frozenset[Part], frozenset[Part]] = {}
    for gpu in range(node.num_gpus):
        present = _present_on(node, gpu)
        if present not in kinds:
            kinds[present] = _on_gpu(node, sizes, gpu)
    return tuple(kinds[_present_on(node, gpu)] for gpu in range(node.num_gpus))


def _on_gpu(node: Node, sizes: Sizes, gpu: int) -> frozenset[Part]:
    room = node.gpu_bytes * (1 - _RESERVE) - MARGIN

    def fits(staying: frozenset[Part]) -> bool:
        one = node.keeping(staying)
        return all(sum(parts_on_gpu(one, sizes, stage, gpu).values()) <= room for stage in PLAN_STAGES)

    return _cheapest(node, sizes, _present_on(node, gpu), fits)


def _on_host(node: Node, sizes: Sizes) -> frozenset[Part]:
    """Decides for all ranks alike, since they share one memory."""

    def fits(staying: frozenset[Part]) -> bool:
        planned = plan_of(node.keeping(staying), sizes)
        return planned.fits_host if node.config.memory.host_budget_bytes is None else planned.fits_budget

    return _cheapest(node, sizes, frozenset(RESIDENT) - {Part.TORCH_CACHE}, fits)


def _cheapest(node: Node, sizes: Sizes, present: frozenset[Part], fits: Callable[[frozenset[Part]], bool]) -> frozenset[Part]:
    """The part of `present` that stays; only what must stay if no choice fits."""
    known = {**sizes.trainer, **sizes.engine, Part.TORCH_CACHE: sizes.cached}

    def seconds(released: frozenset[Part]) -> float:
        return sum(release_seconds(part, known[part], frozen=sizes.frozen) for part in released)

    choices = (present - released for released in sorted(_releasable(node, present), key=seconds))
    return next((staying for staying in choices if fits(staying)), node.must_stay & present)


def _releasable(node: Node, present: frozenset[Part]) -> Iterator[frozenset[Part]]:
    """Sets of parts that may leave."""
    open_parts = sorted(present - node.must_stay)
    for count in range(len(open_parts) + 1):
        for released in map(frozenset[Part], combinations(open_parts, count)):
            # Parameters read in place leave with everything else that is read.
            if not released & node.published or node.published & present <= released:
                yield released


def _present_on(node: Node, gpu: int) -> frozenset[Part]:
    trainer, engine = _OF_TRAINER.values() if node.has_rank(gpu) else (), _OF_ENGINE.values() if node.has_engine(gpu) else ()
    return frozenset((*trainer, *engine)) - ({Part.TORCH_CACHE} if node.device == "cpu" else frozenset())


def chosen_staying(node: Node, choices: Choices) -> Staying:
    """What stays on each GPU by a node's choices, and what never leaves."""
    staying = [set[Part]() for _ in range(node.num_gpus)]
    for rank, gpu in enumerate(node.gpus.trainer):
        staying[gpu] |= {_OF_TRAINER[name] for name in choices.of_trainer(rank)}
    for rank, gpu in enumerate(node.gpus.rollout):
        staying[gpu] |= {_OF_ENGINE[name] for name in choices.of_rollout(rank)} | node.must_stay
    return tuple(map(frozenset, staying))


def staying_names(node: Node) -> dict[str, Any]:
    """The same by service and rank, as in Choices."""
    return {
        service: tuple(tuple(name for name, part in names.items() if part in node.staying[gpu]) for gpu in gpus)
        for service, gpus, names in (("trainer", node.gpus.trainer, _OF_TRAINER), ("rollout", node.gpus.rollout, _OF_ENGINE))
    }


def stay_and_leave(node: Node) -> list[tuple[str, list[Part], list[Part]]]:
    """Groups GPUs that keep the same: a name, such as "GPUs 0, 1", what stays and what leaves."""
    kinds: dict[tuple[frozenset[Part], frozenset[Part]], list[int]] = {}
    absent = {Part.EXPORT} if node.config.exports_parameters and node.device == "cuda" else frozenset[Part]()
    for gpu, staying in enumerate(node.staying):
        present = _present_on(node, gpu) - absent
        kinds.setdefault((present & staying, present - staying), []).append(gpu)
    return [
        (gpu_names(node, gpus), [part for part in RESIDENT if part in stays], [part for part in RESIDENT if part in leaves])
        for (stays, leaves), gpus in kinds.items()
    ]


def gpu_names(node: Node, gpus: list[int]) -> str:
    """A name as in "GPU 0", "GPUs 0, 2" or "ranks 1-7"."""
    noun = "rank" if node.device == "cpu" else "GPU"
    if len(gpus) == 1:
        return f"{noun} {gpus[0]}"
    runs: list[list[int]] = []
    for gpu in gpus:
        if runs and gpu == runs[-1][-1] + 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return f"{noun}s {', '.join(f'{run[0]}-{run[-1]}' if len(run) > 2 else ', '.join(map(str, run)) for run in runs)}"
