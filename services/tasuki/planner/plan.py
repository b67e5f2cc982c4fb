"""The planner: bytes of every part on every GPU and the host in every stage of the ring. Pure arithmetic: no GPU, no torch.

`plan(layout)` predicts; admission compares `needed_bytes` with free memory; planner/node_plan.py plans a node's configuration;
planner/advice.py draws conclusions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from tasuki.planner.layout import TAGS, Layout, Part, Strategy
from tasuki.planner.rollout_bytes import KvPool, cuda_graphs, engine_step, engine_weights, kv_bytes_per_token, kv_pool
from tasuki.planner.step_bytes import offloaded_bytes, training_peak
from tasuki.planner.trainer_bytes import Bytes, export_arena, frozen_bytes, host_moments, host_reference, trainer_tags
from tasuki.wire.stages import RING, Phase, Stage

TRAINER_TAGS = (Part.TRAINER_WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER)
_BUDGETED = {*TAGS, Part.EXPORT}
_STEP = {Part.LAYERS, Part.WHOLE_GRADIENTS, Part.ACTIVATIONS, Part.LOGITS}
# Gradients are dropped and restored as zeros.
_COPIED = (Part.TRAINER_WEIGHTS, Part.OPTIMIZER)


PlanStage: TypeAlias = Stage | Phase
"""A stage of the ring, or the peak of a phase: a training step or a full batch."""
PLAN_STAGES: tuple[PlanStage, ...] = (
    Phase.TRAIN,
    *(at for rule in RING for at in (rule.stage, rule.completes) if at not in (None, Phase.TRAIN)),
)
"""In ring order, each phase after the stage that completes it."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Bytes at the peak of one stage."""

    stage: PlanStage
    gpus: tuple[Mapping[Part, int], ...]
    """Bytes of each GPU."""
    host: Mapping[Part, int]
    """Bytes by content of the copies; CONTEXTS are the processes."""

    @property
    def gpu_bytes(self) -> int:
        """Bytes on the fullest GPU."""
        return max(sum(parts.values()) for parts in self.gpus)

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def tag_bytes(self) -> int:
        """Bytes of all tags on all GPUs, which a CPU's budget counts."""
        return sum(size for parts in self.gpus for part, size in parts.items() if part in _BUDGETED)


@dataclass(frozen=True, slots=True)
class Plan:
    """The prediction for a layout."""

    layout: Layout
    stages: tuple[StagePlan, ...]
    kv_pool: KvPool

    def stage(self, stage: PlanStage) -> StagePlan:
        return next(each for each in self.stages if each.stage is stage)

    @property
    def gpu_peak(self) -> StagePlan:
        return max(self.stages, key=lambda stage: stage.gpu_bytes)

    @property
    def host_peak(self) -> StagePlan:
        return max(self.stages, key=lambda stage: stage.host_bytes)

    @property
    def fits_gpu(self) -> bool:
        layout = self.layout
        return layout.device == "cpu" or self.gpu_peak.gpu_bytes + layout.overheads.margin <= layout.gpu_bytes

    @property
    def fits_host(self) -> bool:
        return self.host_peak.host_bytes + self.layout.overheads.margin <= self.layout.host_bytes

    @property
    def budget_peak(self) -> StagePlan:
        return max(self.stages, key=lambda stage: stage.tag_bytes)

    @property
    def fits_budget(self) -> bool:
        return self.layout.budget_bytes is None or self.budget_peak.tag_bytes <= self.layout.budget_bytes

    @property
    def has_room_for_a_sequence(self) -> bool:
        """Whether the KV cache holds one sequence of maximum length, without which rollout does not start."""
        return self.kv_pool.num_tokens >= self.layout.longest_sequence

    @property
    def fits(self) -> bool:
        return self.fits_gpu and self.fits_host and self.fits_budget and self.has_room_for_a_sequence


@dataclass(frozen=True, slots=True)
class Need:
    """Additional memory that a stage needs."""

    gpus: tuple[Mapping[Part, int], ...]
    host_bytes: int

    @property
    def gpu_bytes(self) -> int:
        """Bytes on the GPU that needs the most."""
        return max(sum(parts.values()) for parts in self.gpus)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of every part of a layout when present; of what stays, only the KV cache depends on it."""

    trainer: Mapping[Part, int]
    engine: Mapping[Part, int]
    work: Mapping[Part, int]
    """Peak of a training step."""
    kv_pool: KvPool
    frozen: int
    """Bytes of the trainer's weights that are copied to the host once, not whenever they leave."""


def sizes_of(layout: Layout) -> Sizes:
    pool = kv_pool(layout, taken_bytes=_taken_at_start(layout))
    engine = {
        Part.ROLLOUT_WEIGHTS: engine_weights(layout),
        Part.KV_CACHE: pool.num_bytes,
        Part.CUDA_GRAPH: cuda_graphs(layout),
        Part.ENGINE_STEP: engine_step(layout),
    }
    trainer = trainer_tags(layout) | {Part.EXPORT: export_arena(layout)}
    return Sizes(trainer, engine, training_peak(layout), pool, frozen_bytes(layout))


def largest_pool(layout: Layout) -> KvPool:
    """The KV cache bounded only by memory: on a CPU all of it, minus the engine's weights."""
    taken = _taken_at_start(layout)
    if layout.device == "cuda":
        return kv_pool(replace(layout, kv_tokens=None), taken_bytes=taken)
    each = kv_bytes_per_token(layout)
    room = layout.host_bytes if layout.budget_bytes is None else min(layout.host_bytes, layout.budget_bytes)
    num_tokens = max(0, room - engine_weights(layout)) // each
    return KvPool(num_tokens, num_tokens * each)


def plan(layout: Layout) -> Plan:
    """Predicts every stage of `layout`."""
    return plan_of(layout, sizes_of(layout))


def plan_of(layout: Layout, sizes: Sizes) -> Plan:
    """Same as `plan`, with known sizes."""
    layouts = [layout.on_gpu(index) for index in range(layout.num_gpus)]
    stages: list[StagePlan] = []
    for stage in PLAN_STAGES:
        gpus = tuple(parts_on_gpu(one, sizes, stage, index) for index, one in enumerate(layouts))
        stages.append(StagePlan(stage, gpus, _host(layout, layouts, stage, trainer=sizes.trainer, gpus=gpus)))
    return Plan(layout=layout, stages=tuple(stages), kv_pool=sizes.kv_pool)


def needed_bytes(plan: Plan, stage: PlanStage, *, has_published: bool = True) -> Need:
    """Memory that `stage` needs beyond the one before it, on each GPU and the host; it must be free when the stage starts.

    LOAD_TRAINER includes the working memory of the following step, and RESUME_KV that of a full batch, since nothing checks again.
    has_published: whether weights were published before. If not, or if they do not stay, the trainer's copies for the engine are new;
    if not, so is the engine's first batch.
    """
    fullest: dict[PlanStage, PlanStage] = {Stage.LOAD_TRAINER: Phase.TRAIN, Stage.RESUME_KV: Phase.ROLLOUT}
    reached = fullest.get(stage, stage)
    before, after = plan.stage(PLAN_STAGES[PLAN_STAGES.index(stage) - 1]), plan.stage(reached)
    gpus = [_growth(old, new) for old, new in zip(before.gpus, after.gpus, strict=True)]
    if stage is Stage.LOAD_WEIGHTS and not has_published:
        for grown, parts in zip(gpus, after.gpus, strict=True):
            grown |= {part: size for part, size in parts.items() if part is Part.EXPORT}
    if stage is Stage.RESUME_KV and not has_published:
        for grown, parts in zip(gpus, after.gpus, strict=True):
            grown |= {part: size for part, size in parts.items() if part is Part.ENGINE_STEP}
    return Need(gpus=tuple(gpus), host_bytes=max(0, after.host_bytes - before.host_bytes))


def parts_on_gpu(layout: Layout, sizes: Sizes, stage: PlanStage, index: int) -> Mapping[Part, int]:
    """Bytes on one GPU at the peak of a stage. layout: from `Layout.on_gpu`."""
    has_trainer, has_engine = _present(layout, stage)
    parts: Bytes = {}
    if layout.has_rank(index):
        parts |= {part: size for part, size in sizes.trainer.items() if part in has_trainer}
        if stage is Phase.TRAIN:
            parts |= sizes.work
        elif Part.TORCH_CACHE in has_trainer:
            parts[Part.TORCH_CACHE] = sum(sizes.work.values())
    if layout.has_engine(index):
        parts |= {part: size for part, size in sizes.engine.items() if part in has_engine}
    if layout.device == "cuda":
        has_process = not (layout.strategy is Strategy.RELAUNCH and Part.ROLLOUT_WEIGHTS not in has_engine)
        parts[Part.CONTEXTS] = _contexts(layout, index, has_engine=has_process)
    return {part: size for part, size in parts.items() if size}


_RISING = (Stage.LOAD_WEIGHTS, Stage.RESUME_WEIGHTS, Stage.SYNC)
SERVING = (Stage.RESUME_KV, Phase.ROLLOUT, Stage.DRAIN)
_WITHOUT_TRAINER = (Stage.OFFLOAD, *SERVING, Stage.PAUSE_KV, Stage.PAUSE_WEIGHTS)


def _present(layout: Layout, stage: PlanStage) -> tuple[set[Part], set[Part]]:
    """Parts of trainer and engine on a GPU in `stage`."""
    trainer = {*TRAINER_TAGS, Part.EXPORT}
    engine = {Part.ROLLOUT_WEIGHTS, Part.KV_CACHE, Part.CUDA_GRAPH}
    if layout.sync_bucket_bytes is not None and stage is not Stage.SYNC:
        trainer.discard(Part.EXPORT)
    if not layout.export_stays and layout.strategy is not Strategy.RESIDENT and stage not in _RISING:
        trainer.discard(Part.EXPORT)
    is_alone = layout.strategy is Strategy.RELAUNCH
    if stage in _WITHOUT_TRAINER or (is_alone and stage in _RISING[1:]):
        trainer -= layout.released if layout.strategy is not Strategy.RESIDENT else set()
    elif stage in _RISING:
        trainer -= layout.released_early
        if not layout.empties_cache:
            trainer |= {Part.TORCH_CACHE}
    if layout.cache_stays and stage is not Phase.TRAIN:
        trainer.add(Part.TORCH_CACHE)
    if is_alone:
        trainer.discard(Part.EXPORT)
    engine -= _asleep(layout, stage)
    if layout.strategy is not Strategy.RELAUNCH or Part.ROLLOUT_WEIGHTS in engine:
        engine.add(Part.ENGINE_STEP)  # torch caches it from the first batch on, asleep or not
    return trainer, engine


def _asleep(layout: Layout, stage: PlanStage) -> set[Part]:
    """The engine's tags that are paused."""
    if layout.strategy is Strategy.RESIDENT:
        return set()
    has_weights = stage not in (Phase.TRAIN, Stage.LOAD_WEIGHTS, Stage.PAUSE_WEIGHTS, Stage.LOAD_TRAINER)
    has_cache = stage in SERVING
    if layout.strategy is Strategy.ONE_STAGE:
        has_cache = has_weights and stage is not Stage.PAUSE_KV
    away = (set() if has_weights else {Part.ROLLOUT_WEIGHTS}) | (set() if has_cache else {Part.KV_CACHE})
    if layout.strategy is not Strategy.RELAUNCH:
        away &= layout.released
    return away | ({Part.CUDA_GRAPH} if Part.KV_CACHE in away else set())


def _host(
    layout: Layout,
    layouts: Sequence[Layout],
    stage: PlanStage,
    *,
    trainer: Mapping[Part, int],
    gpus: Sequence[Mapping[Part, int]],
) -> Bytes:
    """layouts: by GPU."""
    host = {Part.CONTEXTS: layout.overheads.host_process * (layout.num_ranks + layout.num_engine_ranks + 1)}
    host[Part.MODEL_COPY] = layout.preloaded_bytes
    if layout.strategy is not Strategy.RESIDENT:
        # Pinned once, at the first pause, then kept.
        ranks = [one.released | one.released_early for gpu, one in enumerate(layouts) if layout.has_rank(gpu)]
        host |= {part: trainer[part] * sum(part in released for released in ranks) for part in _COPIED}
    host[Part.TRAINER_WEIGHTS] = host.get(Part.TRAINER_WEIGHTS, 0) + host_reference(layout) * layout.num_ranks
    host[Part.OPTIMIZER] = host.get(Part.OPTIMIZER, 0) + host_moments(layout) * layout.num_ranks
    if layout.strategy is Strategy.RELAUNCH and stage is Stage.LOAD_WEIGHTS:
        # The checkpoint on its way to disk.
        host[Part.EXPORT] = layout.model.num_parameters * layout.engine_bytes
    # Pinned at start, then kept.
    host[Part.ACTIVATIONS] = offloaded_bytes(layout) * layout.num_ranks
    if layout.device == "cpu":
        for parts in gpus:
            for part, size in parts.items():
                host[part] = host.get(part, 0) + size
    return {part: size for part, size in host.items() if size}


def _contexts(layout: Layout, index: int, *, has_engine: bool) -> int:
    overheads, total = layout.overheads, 0
    if layout.has_rank(index):
        # Ranks that share sequences, if not all ranks do, have an additional communicator.
        is_split = 1 < layout.sequence_parallel < layout.num_ranks
        total += overheads.trainer_context + overheads.nccl * (2 if is_split else 1)
    if layout.has_engine(index) and has_engine:
        total += overheads.rollout_context + overheads.rollout_cached + (overheads.nccl if layout.tp_size > 1 else 0)
    return total


def _taken_at_start(layout: Layout) -> int:
    """Bytes on its fullest GPU when the engine sizes its cache: its context, and trainer tags that never leave.

    Excludes the trainer's context, which starts after the engine. Tags in `staying` also make room then, except parameters that the engine
    reads in place.
    """
    if layout.device == "cpu":
        return 0
    if layout.staying is None:
        never_released = frozenset(TRAINER_TAGS) - layout.released
    else:
        kept = all(Part.TRAINER_WEIGHTS in one for gpu, one in enumerate(layout.staying) if layout.has_rank(gpu))
        never_released = frozenset({Part.TRAINER_WEIGHTS} if layout.exports_parameters and kept else ())
    stays = sum(size for part, size in trainer_tags(layout).items() if part in never_released)
    is_shared = any(layout.has_rank(gpu) and layout.has_engine(gpu) for gpu in range(layout.num_gpus))
    own = layout.overheads.rollout_context + (layout.overheads.nccl if layout.tp_size > 1 else 0)
    return own + (stays if is_shared else 0)


def _growth(before: Mapping[Part, int], after: Mapping[Part, int]) -> Bytes:
    grown = {part: size - before.get(part, 0) for part, size in after.items()}
    if before.keys() & _STEP and not after.keys() & _STEP:
        grown.pop(Part.TORCH_CACHE, None)  # it caches the step's memory, which is already counted
    return {part: size for part, size in grown.items() if size > 0}
