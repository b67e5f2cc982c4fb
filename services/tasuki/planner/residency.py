"""Decides what stays on each GPU during the other phase, the cheapest choice that fits, and estimates what moving the rest costs.

Rates were measured on H200s (docs/benchmarks.md). No rate decides whether something fits.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from tasuki.config.choices import Choices
from tasuki.planner.node import GB, MARGIN, RESIDENT, Node, Part, Staying, Strategy
from tasuki.planner.plan import COPIED, PLAN_STAGES, Plan, Sizes, parts_on_gpu, plan_of, sizes_of
from tasuki.wire.stages import Stage

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
        # All ranks alike, since they share one memory.
        def fits(staying: frozenset[Part]) -> bool:
            planned = plan_of(node.keeping(staying), sizes)
            return planned.fits_host if node.config.memory.host_budget_bytes is None else planned.fits_budget

        staying = _cheapest(node, sizes, frozenset(RESIDENT) - {Part.TORCH_CACHE}, fits)
        return tuple(_present_on(node, gpu) & staying for gpu in range(node.num_gpus))
    staying = _on_gpus(node, sizes)
    # Parameters that leave although the engine could read them in place leave room for a larger cache.
    grown = sizes_of(replace(node, staying=staying))
    return staying if grown.kv_pool.num_bytes <= sizes.kv_pool.num_bytes else _on_gpus(node, grown)


def _on_gpus(node: Node, sizes: Sizes) -> Staying:
    gpu_of = {_present_on(node, gpu): gpu for gpu in reversed(range(node.num_gpus))}
    kinds = {present: _on_gpu(node, sizes, gpu) for present, gpu in gpu_of.items()}
    return tuple(kinds[_present_on(node, gpu)] for gpu in range(node.num_gpus))


def _on_gpu(node: Node, sizes: Sizes, gpu: int) -> frozenset[Part]:
    room = node.gpu_bytes * (1 - _RESERVE) - MARGIN

    def fits(staying: frozenset[Part]) -> bool:
        one = node.keeping(staying)
        return all(sum(parts_on_gpu(one, sizes, stage, gpu).values()) <= room for stage in PLAN_STAGES)

    return _cheapest(node, sizes, _present_on(node, gpu), fits)


def _cheapest(node: Node, sizes: Sizes, present: frozenset[Part], fits: Callable[[frozenset[Part]], bool]) -> frozenset[Part]:
    """The part of `present` that stays; only what must stay if no choice fits."""
    known = {**sizes.trainer, **sizes.engine, Part.TORCH_CACHE: sizes.cached}

    def seconds(released: frozenset[Part]) -> float:
        return sum(release_seconds(part, known[part], frozen=sizes.frozen) for part in released)

    open_parts = sorted(present - node.must_stay)
    subsets = [frozenset(parts) for count in range(len(open_parts) + 1) for parts in combinations(open_parts, count)]
    # Parameters read in place leave with everything else that is read; those that are merged must.
    read = node.published & present
    releasable = [one for one in subsets if read <= one or not (one & read or node.merges_in_place)]
    choices = (present - released for released in sorted(releasable, key=seconds))
    return next((staying for staying in choices if fits(staying)), node.must_stay & present)


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
    absent = {Part.EXPORT} if node.exports_parameters and node.device == "cuda" else frozenset[Part]()
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


# Seconds per byte.
_COPY = 1 / (55 * GB)  # host <-> device, pinned
_MAKE = 1.8e-3 / GB  # create, scrub and map
_RELEASE = 1.3e-3 / GB
_PUBLISH = 1 / (1000 * GB)  # reads a parameter or merges it, writes it in the engine's dtype and sums it
_PULL = 1 / (373 * GB)  # over NVLink
_READ = 1 / (2000 * GB)  # on the same GPU
# Seconds independent of bytes.
_COMMAND = 3e-3
_SYNC = 4e-3
_RENEW = 45e-3  # what left is published under other handles: every engine rank imports them again


def release_seconds(part: Part, num_bytes: int, *, frozen: int) -> float:
    """Seconds of a whole round in which `part` leaves and returns. frozen: of the trainer's weights, bytes that the host has already."""
    seconds = num_bytes * (_MAKE + _RELEASE)
    if part in COPIED:
        return seconds + (2 * num_bytes - (frozen if part is Part.TRAINER_WEIGHTS else 0)) * _COPY
    return seconds + (_RENEW if part is Part.EXPORT else 0.0)


def expected_seconds(planned: Plan) -> dict[str, float]:
    """Seconds of every stage on its slowest GPU, without one-time costs of the first round. Empty on a CPU, and if the GPUs are not
    shared in stages."""
    node = planned.node
    if node.device == "cpu" or node.strategy is not Strategy.STAGED:
        return {}
    sizes = sizes_of(node)
    longest: dict[str, float] = {}
    for gpu in range(node.num_gpus):
        for stage, seconds in _stage_seconds(node, sizes, gpu).items():
            longest[stage] = max(longest.get(stage, 0.0), seconds)
    return longest


def _stage_seconds(node: Node, sizes: Sizes, gpu: int) -> Mapping[Stage, float]:
    export, staying, leaving = sizes.trainer[Part.EXPORT], node.staying[gpu], node.released(gpu)
    export_stays = Part.EXPORT in staying
    published = sizes.trainer[Part.TRAINER_WEIGHTS] if node.merges_in_place else export
    trainer = {**sizes.trainer, Part.TORCH_CACHE: sizes.cached} if node.has_rank(gpu) else {}
    engine = sizes.engine if node.has_engine(gpu) else {}
    left = {part: size for part, size in trainer.items() if part in leaving}
    copied = sum(size for part, size in left.items() if part in COPIED) - (sizes.frozen if Part.TRAINER_WEIGHTS in left else 0)
    released = sum(left.values()) + sum(trainer.get(part, 0) for part in (Part.EXPORT, Part.TORCH_CACHE) if part not in staying)
    weights = engine.get(Part.ROLLOUT_WEIGHTS, 0) if Part.ROLLOUT_WEIGHTS in leaving else 0
    cache = sum(engine.get(part, 0) for part in (Part.KV_CACHE, Part.CUDA_GRAPH)) if Part.KV_CACHE in leaving else 0
    # Of what a replica reads, the trainer rank on its own GPU has one part.
    near = engine.get(Part.ROLLOUT_WEIGHTS, 0) * node.has_rank(gpu) / node.num_ranks
    far = engine.get(Part.ROLLOUT_WEIGHTS, 0) - near
    made, renewed_s = (0, 0.0) if export_stays else (trainer.get(Part.EXPORT, 0), _RENEW)
    return {
        Stage.LOAD_WEIGHTS: 2 * _COMMAND + made * _MAKE + (published * _PUBLISH if trainer else 0.0),
        Stage.RESUME_WEIGHTS: _COMMAND + weights * _MAKE,
        Stage.SYNC: _SYNC + renewed_s + near * _READ + far * _PULL,
        Stage.OFFLOAD: _COMMAND + released * _RELEASE + copied * _COPY,
        Stage.RESUME_KV: _COMMAND + cache * _MAKE,
        Stage.DRAIN: _COMMAND,
        Stage.PAUSE_KV: _COMMAND + cache * _RELEASE,
        Stage.PAUSE_WEIGHTS: _COMMAND + weights * _RELEASE,
        # Content is restored after the stage.
        Stage.LOAD_TRAINER: 2 * _COMMAND + sum(left.values()) * _MAKE,
    }
