"""What a plan starts from: a model, GPUs, and every setting of trainer and rollout that decides bytes. Defaults are what we run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Literal

from tasuki.config.devices import MAX_GPUS
from tasuki.config.trainer_schema import DEFAULT_MICRO_BATCH_TOKENS
from tasuki.models.shape import ModelShape
from tasuki.wire.errors import InvalidArgument

GB = 10**9
MIB = 2**20


class Part(StrEnum):
    """What memory is taken by. The first five are tags, which can leave a GPU and come back."""

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


TAGS = (Part.TRAINER_WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER, Part.ROLLOUT_WEIGHTS, Part.KV_CACHE)
"""What may be told to leave. CUDA graphs go with the KV cache."""
RESIDENT = (*TAGS, Part.EXPORT, Part.TORCH_CACHE)
"""What may stay while the other service works; the rest comes and goes with a step or a batch."""


class Strategy(StrEnum):
    """How trainer and rollout share a GPU."""

    RESIDENT = "v0"
    """Both keep everything."""
    RELAUNCH = "v1"
    """The trainer leaves, weights go to disk, and a new engine starts from there."""
    ONE_STAGE = "v2"
    """The engine sleeps, and wakes weights and KV cache at once, before the trainer leaves."""
    STAGED = "v3"
    """Weights wake first; the KV cache wakes when the trainer has left. Ours."""


class Checkpointing(StrEnum):
    """What of the activations is kept for backward, the fastest first."""

    NONE = "none"
    ATTENTION = "attention"
    """The input of each layer, and the output of its attention; the rest is recomputed."""
    FULL = "full"
    """The input of each layer; a layer's activations are recomputed."""
    OFFLOADED = "offloaded"
    """As full, with the inputs in host memory, two at a time on the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Bytes of a process that no setting decides.

    Their sums are what sleeping services still held on an H200 (docs/benchmarks.md: 1.8 GB the trainer, 1.8 GB the engine); how they are
    divided, CUDA graphs, NCCL above one rank and host processes are estimates.
    """

    trainer_context: int = 1_300 * 10**6
    rollout_context: int = 1_500 * 10**6
    rollout_cached: int = 280 * 10**6
    """Blocks that torch caches in the engine, asleep or not."""
    nccl: int = 550 * 10**6
    """Buffers of one communicator, of a trainer rank or of an engine rank above TP 1."""
    cuda_graph: int = 600 * 10**6
    margin: int = 512 * MIB
    """What must stay free."""
    host_process: int = 3 * GB
    """Resident memory of a rank's process: Python, torch, CUDA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One node as the planner sees it. Raises InvalidArgument naming the field that makes no sense."""

    model: ModelShape
    num_gpus: int
    gpu_bytes: int
    host_bytes: int
    device: Literal["cpu", "cuda"] = "cuda"
    """On "cpu" the ranks' memory is the host's, and `gpu_bytes` is not used."""
    num_ranks: int
    """FSDP2 ranks, on the first GPUs."""
    sequence_parallel: int = 1
    """Ranks that share a micro-batch."""
    tp_size: int = 1
    num_engines: int = 1
    """Engines of `tp_size` GPUs each, on the first GPUs."""
    rank_gpus: tuple[int, ...] | None = None
    """GPU of each FSDP2 rank, where they are not the first ones."""
    engine_gpus: tuple[int, ...] | None = None
    """GPU of each engine rank, where they are not the first ones."""
    compute_bytes: int = 2
    """Of one element in forward and backward; 2 is bfloat16."""
    engine_bytes: int = 2
    param_bytes: int = 4
    """Of one element of the weights that are trained, of a gradient and of a moment."""
    exports_parameters: bool = False
    """Whether the engine reads the parameters themselves; else a copy in its dtype."""
    export_stays: bool = True
    """Whether what the engine reads stays on the GPU over OFFLOAD; else it leaves then, and a copy comes back at LOAD_WEIGHTS."""
    micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS["cuda"]
    """Most tokens in one, of all ranks that share it; sequences follow one another without padding."""
    logit_tokens: int | None = None
    """Places of a micro-batch whose logits are computed: those of completion tokens. By default all, an upper bound."""
    checkpointing: Checkpointing = Checkpointing.NONE
    kept_layers: int = 0
    """Layers, the last ones, of which everything is kept whatever `checkpointing` says; not where it holds inputs on the host."""
    mlp_tile_tokens: int | None = None
    """Tokens of which a rank computes an MLP at a time, with what is inside it computed again in backward; by default all."""
    optimizer_on_host: bool = False
    """Whether the moments stay in host memory all the time."""
    optimizer_8bit: bool = False
    reshards_after_forward: bool = True
    has_reference: bool = False
    lora_rank: int | None = None
    """Rank of adapters at linear layers; the base is then frozen, in compute dtype, and stays in the engine."""
    lora_targets: tuple[str, ...] | None = None
    """Names of the layers that have adapters; by default every matrix but the router, each expert's apart."""
    critic: ModelShape | None = None
    """A second model that is trained, with its own gradients and optimizer state."""
    critic_lora_rank: int | None = None
    critic_lora_targets: tuple[str, ...] | None = None
    shares_base: bool = False
    """With `lora_rank`: whether the base is the engine's memory, which the trainer reads."""
    merges_adapters: bool = False
    """With `lora_rank`: whether adapters go to the engine within whole weights, which then leave as without LoRA."""
    strategy: Strategy = Strategy.STAGED
    sleeping: frozenset[Part] = frozenset(TAGS)
    """Tags that leave while the other service has the GPU. Not used where `staying` says it by GPU."""
    staying: tuple[frozenset[Part], ...] | None = None
    """For each GPU, what of RESIDENT stays while the other service has it."""
    cache_stays: bool = False
    """Whether torch keeps a step's working memory over OFFLOAD."""
    empties_cache: bool = False
    """Whether the trainer gives back what torch caches before the engine wakes; else at OFFLOAD."""
    leaves_early: frozenset[Part] = frozenset()
    """Trainer's tags that leave already before the weights are published."""
    sync_bucket_bytes: int | None = None
    """Weights pass in buckets of this size; by default through an arena that holds the whole shard."""
    kv_ratio: float = 0.85
    kv_tokens: int | None = None
    """Tokens in a replica's KV cache; by default what `kv_ratio` leaves, which is never exceeded on a GPU."""
    context_length: int | None = None
    """Longest sequence that rollout serves; by default the model's own."""
    has_cuda_graphs: bool = True
    max_running_requests: int = 256
    overheads: Overheads = field(default_factory=Overheads)

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgument(name, f"must be at least 1, not {value}")
        if self.num_gpus > MAX_GPUS:
            raise InvalidArgument("num_gpus", f"must be at most {MAX_GPUS} on one node, not {self.num_gpus}")
        if not 0 < self.kv_ratio < 1:
            raise InvalidArgument("kv_ratio", f"must lie between 0 and 1, not {self.kv_ratio}")
        if self.model.num_heads % self.tp_size:
            raise InvalidArgument(
                "tp_size", f"{self.model.num_heads} attention heads cannot be split over {self.tp_size} ranks"
            )
        if self.num_ranks > self.num_gpus:
            raise InvalidArgument("num_ranks", f"{self.num_ranks} ranks need as many GPUs; there are {self.num_gpus}")
        if self.num_ranks % self.sequence_parallel:
            raise InvalidArgument("sequence_parallel", f"{self.sequence_parallel} does not divide {self.num_ranks} ranks")
        problem = unshared_heads(self.model, self.sequence_parallel)
        if problem is not None:
            raise InvalidArgument("sequence_parallel", problem)
        if self.tp_size * self.num_engines > self.num_gpus:
            needed = self.tp_size * self.num_engines
            raise InvalidArgument(
                "tp_size" if self.tp_size > self.num_gpus else "num_engines",
                f"{self.num_engines} engines of TP {self.tp_size} need {needed} GPUs, not {self.num_gpus}",
            )
        if self.exports_parameters and self.param_bytes != self.engine_bytes:
            raise InvalidArgument(
                "exports_parameters",
                f"parameters of {self.param_bytes} bytes an element cannot be read by an engine that holds {self.engine_bytes}",
            )
        for name, on, num_ranks in (
            ("rank_gpus", self.rank_gpus, self.num_ranks), ("engine_gpus", self.engine_gpus, self.num_engine_ranks)
        ):  # fmt: skip
            if on is not None and (len(set(on)) != num_ranks or not set(on) <= set(range(self.num_gpus))):
                raise InvalidArgument(name, f"must be {num_ranks} of {self.num_gpus} GPUs, not {on}")
        wrong = (self.sleeping | self.leaves_early) - frozenset(TAGS)
        if wrong:
            raise InvalidArgument("sleeping", f"{', '.join(sorted(wrong))} cannot leave; what can is {', '.join(TAGS)}")
        if self.staying is not None and len(self.staying) != self.num_gpus:
            raise InvalidArgument("staying", f"must say it for each of {self.num_gpus} GPUs, not for {len(self.staying)}")

    def has_rank(self, gpu: int) -> bool:
        return gpu < self.num_ranks if self.rank_gpus is None else gpu in self.rank_gpus

    def has_engine(self, gpu: int) -> bool:
        return gpu < self.num_engine_ranks if self.engine_gpus is None else gpu in self.engine_gpus

    def on_gpu(self, index: int) -> Layout:
        """The same where all GPUs keep what this one does."""
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
    def leaving(self) -> frozenset[Part]:
        """Of `sleeping`, what does leave: parameters that are to stay for the engine's next read do not."""
        return self.sleeping - ({Part.TRAINER_WEIGHTS} if self.exports_parameters and self.export_stays else frozenset())

    @property
    def rank_tokens(self) -> int:
        """Most tokens of a micro-batch on one rank."""
        return -(-self.micro_batch_tokens // self.sequence_parallel)

    @property
    def has_mlp_tiles(self) -> bool:
        """Whether a full micro-batch has more than one."""
        return self.mlp_tile_tokens is not None and self.mlp_tile_tokens < self.rank_tokens

    @property
    def mlp_tokens(self) -> int:
        """Most tokens of one rank that are inside an MLP at a time."""
        return self.rank_tokens if self.mlp_tile_tokens is None else min(self.mlp_tile_tokens, self.rank_tokens)

    @property
    def longest_sequence(self) -> int:
        return self.context_length or self.model.context_length

    @property
    def num_engine_ranks(self) -> int:
        return self.tp_size * self.num_engines

    def of_critic(self) -> Layout | None:
        """The critic as a policy of its shape, with nothing to publish; None without one."""
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
        )


def unshared_heads(model: ModelShape, num_ranks: int) -> str | None:
    """Why so many ranks cannot share the heads of a model; None when they can."""
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if heads % num_ranks:
        return f"{num_ranks} ranks cannot share {heads} attention heads evenly"
    if kv_heads % num_ranks and num_ranks % kv_heads:
        return f"{num_ranks} ranks can neither share {kv_heads} key heads evenly, nor have one of them each"
    return None


_POSITIVE = (
    "num_gpus", "gpu_bytes", "host_bytes", "num_ranks", "sequence_parallel", "tp_size", "num_engines", "compute_bytes", "engine_bytes",
    "param_bytes", "micro_batch_tokens", "mlp_tile_tokens", "logit_tokens", "lora_rank",
    "critic_lora_rank", "sync_bucket_bytes", "kv_tokens", "context_length",
    "max_running_requests",
)  # fmt: skip
assert set(_POSITIVE) <= {each.name for each in fields(Layout)}


@contextmanager
def named_as_given(names: Mapping[str, str]) -> Iterator[None]:
    """Where Layout finds a field wrong, the error says `names[field]`, which is what the user has set."""
    try:
        yield
    except InvalidArgument as error:
        wrong = error.metadata["field"]
        if wrong not in names:
            raise
        raise InvalidArgument(names[wrong], error.message.removeprefix(f"{wrong}: ")) from error


def gb(num_bytes: int) -> str:
    """As people read it, in 10^9 bytes."""
    return f"{num_bytes / GB:,.1f}" if num_bytes >= GB / 20 else f"{num_bytes / GB:.3f}"
