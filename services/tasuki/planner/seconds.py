"""Estimated cost of moving memory off a GPU and back, and expected durations of a changeover's stages.

Rates were measured on H200s (docs/benchmarks.md). Nothing here decides whether something fits.
"""

from __future__ import annotations

from collections.abc import Mapping

from tasuki.planner.node import GB, Node, Part, Strategy
from tasuki.planner.plan import COPIED, Plan, Sizes, sizes_of
from tasuki.wire.stages import HOLDS, RING, Phase, Stage

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


def stages_to(phase: Phase) -> tuple[Stage, ...]:
    """The stages of a changeover from the other phase."""
    names = [rule.stage for rule in RING]
    origin = Phase.TRAIN if phase is Phase.ROLLOUT else Phase.ROLLOUT
    first, last = (names.index(HOLDS[each]) for each in (origin, phase))
    return tuple(names[(first + 1) % len(names) : last + 1])


def expected_seconds(planned: Plan) -> dict[str, float]:
    """Seconds of every stage on its slowest GPU, without one-time costs of the first round. Empty on a CPU, and if the GPUs are not
    shared in stages."""
    node = planned.node
    if node.device == "cpu" or node.strategy is not Strategy.STAGED:
        return {}
    sizes = sizes_of(node)
    longest: dict[str, float] = {}
    for gpu in range(node.num_gpus):
        for stage, seconds in _on_gpu(node, sizes, gpu).items():
            longest[stage] = max(longest.get(stage, 0.0), seconds)
    return longest


def _on_gpu(node: Node, sizes: Sizes, gpu: int) -> Mapping[Stage, float]:
    export, staying, leaving = sizes.trainer[Part.EXPORT], node.staying[gpu], node.released(gpu)
    export_stays = Part.EXPORT in staying
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
        Stage.LOAD_WEIGHTS: 2 * _COMMAND + made * _MAKE + (export * _PUBLISH if trainer else 0.0),
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
