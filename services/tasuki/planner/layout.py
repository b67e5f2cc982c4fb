"""Input of a plan: a model, GPUs, and every setting of trainer and rollout that affects memory. Defaults are what we run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from tasuki.config.table import MAX_GPUS
from tasuki.config.trainer_schema import DEFAULT_MICRO_BATCH_TOKENS
from tasuki.models.shape import ModelShape
from tasuki.wire.errors import InvalidArgument

GB = 10**9
MIB = 2**20


class Part(StrEnum):
    """Uses of memory. The first five are tags, which can leave a GPU and come back."""

    TRAINER_WEIGHTS = "trainer weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ROLLOUT_WEIGHTS = "rollout weights"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"
    EXPORT = "export arena"
    LAYERS = "gathered layers"
    WHOLE_GRADIENTS = "whole gradients"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    ENGINE_STEP = "engine's batch"
    TORCH_CACHE = "torch's cache"
    CONTEXTS = "contexts, NCCL"
    MODEL_COPY = "model in /dev/shm"


TAGS = (Part.TRAINER_WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER, Part.ROLLOUT_WEIGHTS, Part.KV_CACHE)
"""Tags that may be told to leave. CUDA graphs follow the KV cache."""
RESIDENT = (*TAGS, Part.EXPORT, Part.TORCH_CACHE)
"""Parts that may stay during the other phase; the rest exists only within a step or a batch."""


class Strategy(StrEnum):
    """How trainer and rollout share a GPU."""

    RESIDENT = "v0"
    """Both stay resident."""
    RELAUNCH = "v1"
    """The trainer leaves, weights go to disk, and a new engine loads them."""
    ONE_STAGE = "v2"
    """The engine sleeps; weights and KV cache wake at once, before the trainer leaves."""
    STAGED = "v3"
    """Weights wake first, and the KV cache after the trainer has left. Ours."""


class Checkpointing(StrEnum):
    """Activations kept for backward, fastest first."""

    NONE = "none"
    ATTENTION = "attention"
    """Each layer's input and its attention's output; the rest is recomputed."""
    FULL = "full"
    """Each layer's input; its activations are recomputed."""
    OFFLOADED = "offloaded"
    """Same as attention, in host memory; those of two layers at a time are on the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Fixed memory of processes, in bytes.

    The sums are what sleeping services still held on an H200 (docs/benchmarks.md: 1.8 GB each for trainer and engine). Their breakdown,
    CUDA graphs, NCCL above one rank, and host processes are estimates.
    """

    trainer_context: int = 1_300 * 10**6
    rollout_context: int = 1_500 * 10**6
    rollout_cached: int = 280 * 10**6
    """Blocks cached by torch in the engine, asleep or not."""
    nccl: int = 550 * 10**6
    """Buffers of one communicator, for a trainer rank or an engine rank above TP 1."""
    cuda_graph: int = 600 * 10**6
    margin: int = 512 * MIB
    """Memory that must stay free."""
    host_process: int = 3 * GB
    """Resident memory of a rank's process: Python, torch, CUDA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One node, as input for the planner. Raises InvalidArgument naming the key of what model and GPUs cannot do."""

    model: ModelShape
    num_gpus: int
    gpu_bytes: int
    host_bytes: int
    device: Literal["cpu", "cuda"] = "cuda"
    """On "cpu" the ranks use the host's memory, and `gpu_bytes` is ignored."""
    num_ranks: int
    """Number of FSDP2 ranks, on the first GPUs."""
    sequence_parallel: int = 1
    """Ranks that share a micro-batch."""
    expert_parallel: bool = False
    """Whether each rank computes its own experts, which it alone holds."""
    tp_size: int = 1
    num_engines: int = 1
    """Engines of `tp_size` GPUs each, on the first GPUs."""
    rank_gpus: tuple[int, ...] | None = None
    """GPU of each FSDP2 rank, if not the first ones."""
    engine_gpus: tuple[int, ...] | None = None
    """GPU of each engine rank, if not the first ones."""
    compute_bytes: int = 2
    """Bytes per element in forward and backward; 2 is bfloat16."""
    engine_bytes: int = 2
    param_bytes: int = 4
    """Bytes per element of trained weights, gradients and moments."""
    exports_parameters: bool = False
    """Whether the engine reads the parameters in place; otherwise a copy in its dtype."""
    export_stays: bool = True
    """Whether the memory that the engine reads stays on the GPU after OFFLOAD; otherwise a copy returns at LOAD_WEIGHTS."""
    micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS["cuda"]
    """Maximum tokens in a micro-batch, over all ranks that share it; sequences are packed without padding."""
    logit_tokens: int | None = None
    """Positions of a micro-batch whose logits are computed: those of completion tokens. By default all, an upper bound."""
    checkpointing: Checkpointing = Checkpointing.NONE
    kept_layers: int = 0
    """Number of last layers that keep everything, whatever `checkpointing` says."""
    shares_prompts: bool = False
    """Whether samples of one prompt may share its computation, with two calls in each layer's attention."""
    mlp_tile_tokens: int | None = None
    """Tokens per tile of an MLP, which is recomputed in backward; by default one tile."""
    is_compiled: bool = False
    """Whether torch.compile builds the layers' kernels."""
    optimizer_on_host: bool = False
    """Whether the moments always stay in host memory."""
    optimizer_8bit: bool = False
    has_reference: bool = False
    """Whether there is a KL reference beside the policy. With adapters it takes nothing."""
    preloaded_bytes: int = 0
    """The node's copy of the model in shared memory."""
    reference_on_host: bool = False
    """Whether the reference's shards always stay in host memory."""
    lora_rank: int | None = None
    """Rank of adapters on linear layers; the base model is then frozen, in compute dtype, and stays in the engine."""
    lora_targets: tuple[str, ...] | None = None
    """Names of layers with adapters; by default every matrix except the router, and each expert separately."""
    critic: ModelShape | None = None
    """A second trained model, with gradients and optimizer state."""
    critic_lora_rank: int | None = None
    critic_lora_targets: tuple[str, ...] | None = None
    shares_base: bool = False
    """With `lora_rank`: whether the base is the engine's memory, which the trainer reads."""
    merges_adapters: bool = False
    """With `lora_rank`: whether the engine gets merged weights, which then leave as without LoRA."""
    strategy: Strategy = Strategy.STAGED
    sleeping: frozenset[Part] = frozenset(TAGS)
    """Tags that leave during the other phase. Ignored if `staying` is set."""
    staying: tuple[frozenset[Part], ...] | None = None
    """Parts of RESIDENT that stay on each GPU during the other phase."""
    cache_stays: bool = False
    """Whether torch keeps a step's working memory during OFFLOAD."""
    empties_cache: bool = False
    """Whether the trainer empties torch's cache before the engine wakes, instead of at OFFLOAD."""
    released_early: frozenset[Part] = frozenset()
    """Trainer's tags that leave before the weights are published."""
    sync_bucket_bytes: int | None = None
    """Transfers weights in buckets of this size; by default through an arena that holds the whole shard."""
    kv_ratio: float = 0.85
    kv_tokens: int | None = None
    """Tokens in a replica's KV cache; by default what `kv_ratio` leaves, which on a GPU is also the maximum."""
    budget_bytes: int | None = None
    """On "cpu": what the tags of all ranks may take together; by default only the host's memory limits them."""
    context_length: int | None = None
    """Maximum sequence length of rollout; by default the model's own."""
    has_cuda_graphs: bool = True
    graph_requests: int = 256
    """Requests of the largest batch with a CUDA graph."""
    max_running_requests: int = 256
    draft_tokens: int = 0
    """Tokens that speculative decoding verifies for each request in a step; 0 without it."""
    overheads: Overheads = field(default_factory=Overheads)

    def __post_init__(self) -> None:
        if self.model.num_heads % self.tp_size:
            raise InvalidArgument(
                "rollout.tp_size", f"{self.model.num_heads} attention heads cannot be split over {self.tp_size} ranks"
            )
        self._check_gpus()
        problem = unshared_heads(self.model, self.sequence_parallel)
        if problem is not None:
            raise InvalidArgument("trainer.sequence_parallel", problem)
        if self.expert_parallel:
            self._check_experts()

    def _check_gpus(self) -> None:
        if self.num_gpus > MAX_GPUS:
            raise InvalidArgument("gpus", f"must be at most {MAX_GPUS} on one node, not {self.num_gpus}")
        needed = max((*(self.rank_gpus or ()), *(self.engine_gpus or ())), default=-1) + 1
        if needed > self.num_gpus:
            raise InvalidArgument("trainer.devices", f"and rollout.devices name {needed} GPUs, not {self.num_gpus}")
        if self.num_ranks > self.num_gpus:
            raise InvalidArgument("trainer.num_ranks", f"{self.num_ranks} ranks need as many GPUs; there are {self.num_gpus}")
        if self.num_engine_ranks > self.num_gpus:
            raise InvalidArgument(
                "rollout.tp_size" if self.tp_size > self.num_gpus else "rollout.dp_size",
                f"{self.num_engines} engines of TP {self.tp_size} need {self.num_engine_ranks} GPUs, not {self.num_gpus}",
            )

    def _check_experts(self) -> None:
        sparse = [model for model in (self.model, self.critic) if model is not None and model.num_experts]
        if not sparse:
            raise InvalidArgument("trainer.expert_parallel", f"{self.model.architecture} has no experts to spread; remove it")
        for model in sparse:
            problem = unshared_experts(model, self.num_ranks)
            if problem is not None:
                raise InvalidArgument(
                    "trainer.expert_parallel", f"{problem}; give a number of ranks that divides them, or remove it"
                )

    def has_rank(self, gpu: int) -> bool:
        return gpu < self.num_ranks if self.rank_gpus is None else gpu in self.rank_gpus

    def has_engine(self, gpu: int) -> bool:
        return gpu < self.num_engine_ranks if self.engine_gpus is None else gpu in self.engine_gpus

    def on_gpu(self, index: int) -> Layout:
        """The same layout, with all GPUs keeping what this one does."""
        if self.staying is None:
            return self
        staying = self.staying[index]
        return replace(
            self,
            staying=None,
            sleeping=frozenset(TAGS) - staying,
            export_stays=Part.EXPORT in staying,
            cache_stays=Part.TORCH_CACHE in staying,
        )

    @property
    def released(self) -> frozenset[Part]:
        """The tags of `sleeping` that actually leave: neither parameters that stay for the engine's next read, nor the base below an
        engine's adapters."""
        stays = {Part.TRAINER_WEIGHTS} if self.exports_parameters and self.export_stays else set[Part]()
        if self.lora_rank is not None and not self.merges_adapters:
            stays |= {Part.ROLLOUT_WEIGHTS}
        return self.sleeping - stays

    @property
    def rank_tokens(self) -> int:
        """Maximum tokens of a micro-batch on one rank."""
        return -(-self.micro_batch_tokens // self.sequence_parallel)

    @property
    def has_mlp_tiles(self) -> bool:
        """Whether a full micro-batch has more than one tile."""
        return self.mlp_tile_tokens is not None and self.mlp_tile_tokens < self.rank_tokens

    @property
    def mlp_tokens(self) -> int:
        """Maximum tokens of one rank inside an MLP at a time."""
        return self.rank_tokens if self.mlp_tile_tokens is None else min(self.mlp_tile_tokens, self.rank_tokens)

    @property
    def rows_per_token(self) -> int:
        """With `expert_parallel`: most rows that the experts of one rank compute for one token of its micro-batch.

        A bound: tokens of all ranks choose as many experts of this rank as a token may.
        """
        return self.num_ranks * min(self.model.experts_per_token, self.model.num_experts // self.num_ranks)

    @property
    def longest_sequence(self) -> int:
        return self.context_length or self.model.context_length

    @property
    def num_engine_ranks(self) -> int:
        return self.tp_size * self.num_engines

    def of_critic(self) -> Layout | None:
        """The critic as a policy of its shape that publishes nothing; None without a critic."""
        if self.critic is None:
            return None
        return replace(
            self,
            model=replace(self.critic, is_critic=True, is_tied=False),
            lora_rank=self.critic_lora_rank,
            lora_targets=self.critic_lora_targets,
            shares_base=False,
            critic=None,
            has_reference=False,
            expert_parallel=self.expert_parallel and self.critic.num_experts > 0,
        )


def unshared_heads(model: ModelShape, num_ranks: int) -> str | None:
    """Why this many ranks cannot share the model's heads; None if they can."""
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if heads % num_ranks:
        return f"{num_ranks} ranks cannot share {heads} attention heads evenly"
    if kv_heads % num_ranks and num_ranks % kv_heads:
        return f"{num_ranks} ranks can neither share {kv_heads} key heads evenly, nor have one of them each"
    return None


def unshared_experts(model: ModelShape, num_ranks: int) -> str | None:
    """Why this many ranks cannot have equally many of the model's experts; None if they can."""
    if model.num_experts % num_ranks:
        return f"{num_ranks} ranks cannot share {model.num_experts} experts of {model.architecture} evenly"
    return None


def gb(num_bytes: int) -> str:
    """Formats bytes in units of 10^9."""
    return f"{num_bytes / GB:,.1f}" if num_bytes >= GB / 20 else f"{num_bytes / GB:.3f}"
