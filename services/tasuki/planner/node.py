"""A node as the planner sees it: configuration, models and machine, and what is chosen for it."""

from dataclasses import dataclass, replace
from enum import StrEnum

from tasuki.config.checks import check_gpus, check_model
from tasuki.config.gpus import Gpus, gpus_of
from tasuki.config.schema import NodeConfig
from tasuki.config.trainer_schema import LoraConfig, TrainerConfig
from tasuki.models.folder_files import bytes_to_copy
from tasuki.models.known import read_model_shape
from tasuki.models.shape import ModelShape
from tasuki.planner.kv_tokens import wanted_tokens

GB = 10**9
MIB = 2**20
MARGIN = 512 * MIB
"""Memory that must stay free on each GPU and on the host."""


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
    PROCESSES = "processes"
    MODEL_COPY = "model in /dev/shm"
    ROUTES = "routes of tokens"
    IMAGES = "images"


TAGS = (Part.TRAINER_WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER, Part.ROLLOUT_WEIGHTS, Part.KV_CACHE)
"""Tags that may be told to leave. CUDA graphs follow the KV cache."""
RESIDENT = (*TAGS, Part.EXPORT, Part.TORCH_CACHE)
"""Parts that may stay during the other phase; the rest exists only within a step or a batch."""
Staying = tuple[frozenset[Part], ...]
"""Parts of RESIDENT that stay on each GPU, or for each rank of a CPU, during the other phase."""


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


_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a configuration, on a machine, with choices."""

    config: NodeConfig
    model: ModelShape
    """The policy's, or the critic's in `of_critic`."""
    lora: LoraConfig | None
    """That model's adapters. The base is then frozen, in compute dtype."""
    critic: ModelShape | None
    gpus: Gpus
    num_gpus: int
    gpu_bytes: int
    """Ignored on a CPU, where ranks use the host's memory."""
    host_bytes: int
    preloaded_bytes: int
    """The node's copy of the model in shared memory."""
    strategy: Strategy = Strategy.STAGED
    micro_batch_tokens: int
    """Maximum tokens in a micro-batch, over all ranks that share it; sequences are packed without padding."""
    logit_tokens: int | None = None
    """Positions of a micro-batch whose logits are computed: those of completion tokens. By default all, an upper bound."""
    checkpointing: Checkpointing
    kept_layers: int = 0
    """Number of last layers that keep everything, whatever `checkpointing` says."""
    shares_base: bool = False
    """With adapters in the engine: whether the base is the engine's memory, which the trainer reads."""
    merges_in_place: bool = False
    """With merged weights in the engine: whether it reads them in the base's own memory, which then leaves at OFFLOAD."""
    kv_tokens: int | None
    """Tokens in a replica's KV cache; None is what `kv_ratio` leaves, which on a GPU is also the maximum."""
    staying: Staying

    @property
    def trainer(self) -> TrainerConfig:
        return self.config.trainer

    @property
    def device(self) -> str:
        return self.config.device

    @property
    def num_ranks(self) -> int:
        return self.config.trainer.num_ranks

    @property
    def tp_size(self) -> int:
        return self.config.rollout.tp_size

    @property
    def compute_bytes(self) -> int:
        """Bytes per element in forward and backward."""
        return _ELEMENT_BYTES[self.trainer.compute_dtype]

    @property
    def engine_bytes(self) -> int:
        return _ELEMENT_BYTES[self.config.rollout.dtype]

    @property
    def exported_bytes(self) -> int:
        """Bytes of the exported model."""
        return _ELEMENT_BYTES[self.config.export_dtype] * self.model.num_parameters

    @property
    def param_bytes(self) -> int:
        """Bytes per element of trained weights, gradients and moments."""
        return _ELEMENT_BYTES[self.trainer.param_dtype]

    @property
    def has_reference(self) -> bool:
        """Whether weights of a KL reference are planned beside this network's."""
        return self.config.has_reference and not self.model.is_critic

    @property
    def rank_tokens(self) -> int:
        """Maximum tokens of a micro-batch on one rank."""
        return -(-self.micro_batch_tokens // self.trainer.ranks_per_micro_batch)

    @property
    def mlp_tokens(self) -> int:
        """Maximum tokens of one rank inside an MLP at a time."""
        return min(self.trainer.mlp_tile_tokens or self.rank_tokens, self.rank_tokens)

    @property
    def gathers_layers(self) -> bool:
        """Whether ranks gather each layer's parameters to compute with them. megatron-core's compute with the part that they hold."""
        return self.trainer.backend == "fsdp"

    @property
    def fuses_mlp(self) -> bool:
        """Whether MLPs use our own kernels."""
        return self.device == "cuda" and self.trainer.compile != "blocks"

    @property
    def keeps_product(self) -> bool:
        """Whether MLPs keep activation(gate) * up for backward: an adapter needs it, and FSDP2's NONE keeps everything."""
        keeps_all = self.checkpointing is Checkpointing.NONE and self.gathers_layers
        return not self.fuses_mlp or self.lora is not None or keeps_all

    @property
    def rows_per_token(self) -> int:
        """With experts spread over ranks: most rows that those of one rank compute for one token of its micro-batch.

        A bound: tokens of all these ranks choose as many experts of this rank as a token may.
        """
        num_ranks = self.trainer.expert_ranks
        return num_ranks * min(self.model.experts_per_token, self.model.num_experts // num_ranks)

    @property
    def longest_sequence(self) -> int:
        return self.config.rollout.context_length or self.model.context_length

    @property
    def exports_parameters(self) -> bool:
        """Whether the engine reads the trainer's weights directly, without a copy."""
        return self.config.exports_parameters or self.merges_in_place

    def has_rank(self, gpu: int) -> bool:
        return gpu in self.gpus.trainer

    def has_engine(self, gpu: int) -> bool:
        return gpu in self.gpus.rollout

    def keeping(self, staying: frozenset[Part]) -> "Node":
        """The node with the same parts staying on all GPUs."""
        return replace(self, staying=(staying,) * self.num_gpus)

    def released(self, gpu: int) -> frozenset[Part]:
        """Tags that leave a GPU: neither parameters that stay for the engine's next read, nor the base below an engine's adapters."""
        staying = self.staying[gpu]
        if self.exports_parameters and Part.EXPORT in staying:
            staying |= {Part.TRAINER_WEIGHTS}
        return frozenset(TAGS) - staying - self.must_stay

    @property
    def must_stay(self) -> frozenset[Part]:
        """The base below an engine's adapters, which is never sent again."""
        return frozenset({Part.ROLLOUT_WEIGHTS} if self.config.served_adapter is not None else ())

    @property
    def published(self) -> frozenset[Part]:
        """What the engine reads, which stays or leaves as one."""
        return frozenset({Part.EXPORT, Part.TRAINER_WEIGHTS} if self.exports_parameters else {Part.EXPORT})

    def at(self, layer: int) -> "Node":
        """The node with the model `at` this layer."""
        return replace(self, model=self.model.at(layer)) if self.model.layer_sizes else self

    def of_critic(self) -> "Node | None":
        """The critic as a policy of its shape that publishes nothing; None without a critic."""
        if self.critic is None:
            return None
        model = replace(self.critic, is_critic=True, is_tied=False)
        return replace(self, model=model, lora=self.trainer.critic_lora, shares_base=False, merges_in_place=False, critic=None)

    def networks(self) -> "list[Node]":
        """The trained networks: the policy and, if there is one, the critic."""
        critic = self.of_critic()
        return [self] if critic is None else [self, critic]


def node_of(
    config: NodeConfig,
    model: ModelShape | None = None,
    *,
    gpu_bytes: int,
    host_bytes: int,
    num_gpus: int | None = None,
    strategy: Strategy = Strategy.STAGED,
) -> Node:
    """The node with its open settings where the search for them begins: most tokens, offloaded activations, nothing stays.

    model: by default read from its folder. num_gpus: by default as many as the ranks need.
    Raises as read_model_shape, check_model and check_gpus.
    """
    model = read_model_shape(config.model.path) if model is None else model
    critic, gpus, checkpointing = critic_shape(config, model), gpus_of(config), config.trainer.checkpointing
    check_model(config, model, critic=critic)
    num_gpus = max(*gpus.trainer, *gpus.rollout) + 1 if num_gpus is None else num_gpus
    check_gpus(config, gpus, num_gpus=num_gpus)
    return Node(
        config=config,
        model=model,
        lora=config.trainer.lora,
        critic=critic,
        gpus=gpus,
        num_gpus=num_gpus,
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes,
        preloaded_bytes=bytes_to_copy(config.model.path, host_bytes=host_bytes),
        strategy=strategy,
        micro_batch_tokens=config.most_micro_batch_tokens,
        checkpointing=Checkpointing.OFFLOADED if checkpointing == "auto" else Checkpointing(checkpointing),
        kv_tokens=wanted_tokens(config, context_length=config.rollout.context_length or model.context_length),
        staying=(frozenset(),) * num_gpus,
    )


def critic_shape(config: NodeConfig, policy: ModelShape) -> ModelShape | None:
    """Shape of the critic, if there is one. Raises as read_model_shape."""
    critic = config.trainer.critic
    return None if critic is None else policy if critic.path is None else read_model_shape(critic.path)


def gb(num_bytes: int) -> str:
    """Formats bytes in units of 10^9."""
    return f"{num_bytes / GB:,.1f}" if num_bytes >= GB / 20 else f"{num_bytes / GB:.3f}"
