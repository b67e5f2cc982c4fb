"""The planner: bytes of every part on every GPU and the host in every stage of the ring. Pure arithmetic: no GPU, no torch.

`plan(node)` predicts; admission compares `needed_bytes` with free memory; planner/choose.py makes the open choices of a configuration;
planner/advice.py suggests changes.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from tasuki.planner.node import GB, MARGIN, TAGS, Node, Part, Strategy, gb
from tasuki.planner.rollout_bytes import (
    KvPool,
    cuda_graphs,
    engine_step,
    engine_weights,
    host_routes,
    kv_bytes_per_token,
    kv_pool,
)
from tasuki.planner.step_bytes import offloaded_bytes, training_peak
from tasuki.planner.trainer_bytes import (
    Bytes,
    export_arena,
    frozen_bytes,
    host_images,
    host_moments,
    host_reference,
    trainer_tags,
)
from tasuki.wire.stages import RING, Phase, Stage

TRAINER_TAGS = (Part.TRAINER_WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER)
_BUDGETED = {*TAGS, Part.EXPORT}
_STEP = {Part.LAYERS, Part.WHOLE_GRADIENTS, Part.ACTIVATIONS, Part.LOGITS}
COPIED = (Part.TRAINER_WEIGHTS, Part.OPTIMIZER)
"""Tags that leave with their content; gradients are dropped and restored as zeros."""

# Fixed memory of processes. The sums are what sleeping services still held on an H200 (docs/benchmarks.md: 1.8 GB each for trainer and
# engine). Their breakdown, NCCL above one rank, and host processes are estimates.
TRAINER_CONTEXT = 1_300 * 10**6
_ROLLOUT_CONTEXT = 1_500 * 10**6
# Blocks cached by torch in the engine, asleep or not.
_ROLLOUT_CACHED = 280 * 10**6
NCCL = 550 * 10**6
"""Buffers of one communicator, for a trainer rank or an engine rank above TP 1."""
# Resident memory of a rank's process: Python, torch, CUDA.
_HOST_PROCESS = 3 * GB

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
    """Bytes by content of the copies, and PROCESSES."""

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
    """The prediction for a node."""

    node: Node
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
    def budget_peak(self) -> StagePlan:
        return max(self.stages, key=lambda stage: stage.tag_bytes)

    def lacking(self, stage: StagePlan) -> tuple[int, int]:
        """Missing bytes of a stage, on the fullest GPU and on the host."""
        gpu = 0 if self.node.device == "cpu" else stage.gpu_bytes + MARGIN - self.node.gpu_bytes
        return max(0, gpu), max(0, stage.host_bytes + MARGIN - self.node.host_bytes)

    @property
    def later_bytes(self) -> int:
        """Most that stages after LOAD_WEIGHTS take beyond it, on a GPU with a trainer rank; 0 on a CPU."""
        first, later = PLAN_STAGES.index(Stage.LOAD_WEIGHTS), list[int]()
        for gpu in range(self.node.num_gpus if self.node.device == "cuda" else 0):
            before, *after = (sum(stage.gpus[gpu].values()) for stage in self.stages[first:])
            later += [num_bytes - before for num_bytes in after if self.node.has_rank(gpu)]
        return max([0, *later])

    @property
    def fits_gpu(self) -> bool:
        return not self.lacking(self.gpu_peak)[0]

    @property
    def fits_host(self) -> bool:
        return not self.lacking(self.host_peak)[1]

    @property
    def fits_budget(self) -> bool:
        budget = self.node.config.memory.host_budget_bytes
        return budget is None or self.budget_peak.tag_bytes <= budget

    @property
    def fits(self) -> bool:
        return not self.problems()

    def problems(self) -> list[str]:
        """Why the plan does not fit."""
        reasons: list[str] = []
        if not self.fits_gpu:
            reasons.append(f"a GPU {_needs(self.gpu_peak.gpu_bytes, self.node.gpu_bytes)} in {self.gpu_peak.stage}")
        if not self.fits_host:
            reasons.append(f"the host {_needs(self.host_peak.host_bytes, self.node.host_bytes)} in {self.host_peak.stage}")
        if not self.fits_budget:
            peak, budget = self.budget_peak, self.node.config.memory.host_budget_bytes
            reasons.append(f"the tags take {peak.tag_bytes} bytes in {peak.stage}, and memory.host_budget_bytes is {budget}")
        tokens, longest = self.kv_pool.num_tokens, self.node.longest_sequence
        if tokens < longest:  # rollout would not start
            reasons.append(f"the KV cache holds {tokens:,} tokens and a sequence may have {longest:,}")
        return reasons


def _needs(num_bytes: int, there: int) -> str:
    return f"needs {gb(num_bytes + MARGIN)} of {gb(there)} GB, {gb(MARGIN)} of it to spare,"


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
    """Bytes of every part of a node when present; of what stays, only the KV cache depends on it."""

    trainer: Mapping[Part, int]
    engine: Mapping[Part, int]
    work: Mapping[Part, int]
    """Peak of a training step."""
    kv_pool: KvPool
    frozen: int
    """Bytes of the trainer's weights that are copied to the host once, not whenever they leave."""

    @property
    def cached(self) -> int:
        """Bytes that torch caches after a step."""
        return sum(self.work.values())


def sizes_of(node: Node) -> Sizes:
    tags = trainer_tags(node)
    pool = kv_pool(node, taken_bytes=_taken_at_start(node, tags))
    engine = {
        Part.ROLLOUT_WEIGHTS: engine_weights(node),
        Part.KV_CACHE: pool.num_bytes,
        Part.CUDA_GRAPH: cuda_graphs(node),
        Part.ENGINE_STEP: engine_step(node),
    }
    return Sizes(tags | {Part.EXPORT: export_arena(node)}, engine, training_peak(node), pool, frozen_bytes(node))


def largest_pool(node: Node) -> KvPool:
    """The KV cache bounded only by memory: on a CPU all of it, minus the engine's weights."""
    if node.device == "cuda":
        return kv_pool(replace(node, kv_tokens=None), taken_bytes=_taken_at_start(node, trainer_tags(node)))
    each, budget = kv_bytes_per_token(node), node.config.memory.host_budget_bytes
    room = node.host_bytes if budget is None else min(node.host_bytes, budget)
    num_tokens = max(0, room - engine_weights(node)) // each
    return KvPool(num_tokens, num_tokens * each)


def plan(node: Node) -> Plan:
    """Predicts every stage of `node`."""
    return plan_of(node, sizes_of(node))


def plan_of(node: Node, sizes: Sizes) -> Plan:
    """Same as `plan`, with known sizes."""
    stages: list[StagePlan] = []
    kinds = [(node.has_rank(gpu), node.has_engine(gpu), node.staying[gpu]) for gpu in range(node.num_gpus)]
    first_of = {kind: kinds.index(kind) for kind in set(kinds)}
    leaving: Counter[Part] = Counter()
    for kind, gpu in first_of.items():
        if node.has_rank(gpu) and node.strategy is not Strategy.RESIDENT:
            leaving.update(dict.fromkeys(node.released(gpu), kinds.count(kind)))
    num_ranks = node.num_ranks
    # Pinned at the start, then kept.
    kept = {
        Part.PROCESSES: _HOST_PROCESS * (num_ranks + node.config.num_engine_ranks + 1),
        Part.MODEL_COPY: node.preloaded_bytes,
        Part.TRAINER_WEIGHTS: host_reference(node) * num_ranks,
        Part.OPTIMIZER: host_moments(node) * num_ranks,
        Part.ACTIVATIONS: offloaded_bytes(node) * num_ranks,
        Part.ROUTES: host_routes(node, sizes.kv_pool) * node.config.num_engine_ranks,
        Part.IMAGES: host_images(node),
    }
    for stage in PLAN_STAGES:
        parts = {kind: parts_on_gpu(node, sizes, stage, gpu) for kind, gpu in first_of.items()}
        gpus, host = tuple(parts[kind] for kind in kinds), Counter(kept)
        # Copies of what leaves are pinned at the first pause, then kept.
        host.update({part: sizes.trainer[part] * leaving[part] for part in COPIED})
        if node.strategy is Strategy.RELAUNCH and stage is Stage.LOAD_WEIGHTS:
            host[Part.EXPORT] += node.model.num_parameters * node.engine_bytes  # the checkpoint on its way to disk
        for parts_of_rank in gpus if node.device == "cpu" else ():
            host.update(parts_of_rank)
        stages.append(StagePlan(stage, gpus, {part: size for part, size in host.items() if size}))
    return Plan(node=node, stages=tuple(stages), kv_pool=sizes.kv_pool)


def needed_bytes(plan: Plan, stage: PlanStage, *, has_published: bool = True) -> Need:
    """Memory that `stage` needs beyond the one before it, on each GPU and the host; it must be free when the stage starts.

    LOAD_TRAINER includes the working memory of the following step, and RESUME_KV that of a full batch, since nothing checks again.
    has_published: whether weights were published before. If not, or if they do not stay, the trainer's copies for the engine are new;
    if not, so is the engine's first batch.
    """
    fullest: dict[PlanStage, PlanStage] = {Stage.LOAD_TRAINER: Phase.TRAIN, Stage.RESUME_KV: Phase.ROLLOUT}
    before, after = plan.stage(PLAN_STAGES[PLAN_STAGES.index(stage) - 1]), plan.stage(fullest.get(stage, stage))
    gpus: list[Bytes] = []
    for old, new in zip(before.gpus, after.gpus, strict=True):
        grown = {part: size - old.get(part, 0) for part, size in new.items()}
        if old.keys() & _STEP and not new.keys() & _STEP:
            grown.pop(Part.TORCH_CACHE, None)  # it caches the step's memory, which is already counted
        gpus.append({part: size for part, size in grown.items() if size > 0})
    first: dict[PlanStage, Part] = {Stage.LOAD_WEIGHTS: Part.EXPORT, Stage.RESUME_KV: Part.ENGINE_STEP}
    if not has_published:
        for grown, parts in zip(gpus, after.gpus, strict=True):
            grown |= {part: size for part, size in parts.items() if part is first.get(stage)}
    return Need(gpus=tuple(gpus), host_bytes=max(0, after.host_bytes - before.host_bytes))


def parts_on_gpu(node: Node, sizes: Sizes, stage: PlanStage, gpu: int) -> Mapping[Part, int]:
    """Bytes on one GPU at the peak of a stage."""
    has_trainer, has_engine = _present(node, stage, gpu)
    parts: Bytes = {}
    if node.has_rank(gpu):
        parts |= {part: size for part, size in sizes.trainer.items() if part in has_trainer}
        if stage is Phase.TRAIN:
            parts |= sizes.work
        elif Part.TORCH_CACHE in has_trainer:
            parts[Part.TORCH_CACHE] = sizes.cached
    if node.has_engine(gpu):
        parts |= {part: size for part, size in sizes.engine.items() if part in has_engine}
    if node.device == "cuda":
        # Ranks that share sequences, if not all ranks do, have an additional communicator; megatron-core's have one for each axis.
        num_more = int(1 < node.trainer.sequence_parallel < node.num_ranks)
        if not node.gathers_layers:
            sizes_of_groups = [node.trainer.tensor_parallel] + [node.trainer.expert_ranks] * (node.model.num_experts > 0)
            num_more = sum((size > 1) + (size < node.num_ranks) for size in sizes_of_groups)
        contexts = TRAINER_CONTEXT + NCCL * (1 + num_more) if node.has_rank(gpu) else 0
        if node.has_engine(gpu) and Part.ENGINE_STEP in has_engine:
            contexts += _ROLLOUT_CACHED + _engine_context(node)
        parts[Part.CONTEXTS] = contexts
    return {part: size for part, size in parts.items() if size}


_RISING = (Stage.LOAD_WEIGHTS, Stage.RESUME_WEIGHTS, Stage.SYNC)
_SERVING = (Stage.RESUME_KV, Phase.ROLLOUT, Stage.DRAIN)
_WITHOUT_TRAINER = (Stage.OFFLOAD, *_SERVING, Stage.PAUSE_KV, Stage.PAUSE_WEIGHTS)


def _present(node: Node, stage: PlanStage, gpu: int) -> tuple[set[Part], set[Part]]:
    """Parts of trainer and engine on a GPU in `stage`."""
    staying, strategy = node.staying[gpu], node.strategy
    is_resident, is_alone = strategy is Strategy.RESIDENT, strategy is Strategy.RELAUNCH
    trainer = {*TRAINER_TAGS, Part.EXPORT}
    if is_alone or not (Part.EXPORT in staying or is_resident or stage in _RISING):
        trainer.discard(Part.EXPORT)
    if stage in _WITHOUT_TRAINER or (is_alone and stage in _RISING[1:]):
        trainer -= set() if is_resident else node.released(gpu)
    elif stage in _RISING:
        trainer.add(Part.TORCH_CACHE)
    if Part.TORCH_CACHE in staying and stage is not Phase.TRAIN:
        trainer.add(Part.TORCH_CACHE)
    has_weights = stage not in (Phase.TRAIN, Stage.LOAD_WEIGHTS, Stage.PAUSE_WEIGHTS, Stage.LOAD_TRAINER)
    has_cache = stage in _SERVING or (strategy is Strategy.ONE_STAGE and has_weights and stage is not Stage.PAUSE_KV)
    asleep = (set() if has_weights else {Part.ROLLOUT_WEIGHTS}) | (set() if has_cache else {Part.KV_CACHE})
    if is_resident:
        asleep = set[Part]()
    elif not is_alone:
        asleep &= node.released(gpu)
    engine = {Part.ROLLOUT_WEIGHTS, Part.KV_CACHE, Part.CUDA_GRAPH} - asleep
    if Part.KV_CACHE in asleep:
        engine.discard(Part.CUDA_GRAPH)
    if not is_alone or Part.ROLLOUT_WEIGHTS in engine:
        engine.add(Part.ENGINE_STEP)  # torch caches it from the first batch on, asleep or not
    return trainer, engine


def _engine_context(node: Node) -> int:
    return _ROLLOUT_CONTEXT + (NCCL if node.tp_size > 1 else 0)


def _taken_at_start(node: Node, tags: Bytes) -> int:
    """Bytes on its fullest GPU when the engine sizes its cache: its context, and parameters that it will read in place.

    Excludes the trainer's context, which starts after the engine. Other tags that stay make room then.
    """
    if node.device == "cpu":
        return 0
    stays = node.exports_parameters and all(Part.TRAINER_WEIGHTS in node.staying[gpu] for gpu in node.gpus.trainer)
    is_shared = not set(node.gpus.trainer).isdisjoint(node.gpus.rollout)
    return _engine_context(node) + (tags[Part.TRAINER_WEIGHTS] if stays and is_shared else 0)
