"""The trainer's tables: optimizers, adapters, critic."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from tasuki.config.checks import UNSERVED_LINEAR
from tasuki.config.table import Bool, Devices, Distinct, Float, Int, PositiveFloat, PositiveInt, Schema
from tasuki.models.adapter_folder import is_end, is_match, unfused
from tasuki.models.tower import TOWER

if TYPE_CHECKING:
    from tasuki.models.shape import ModelShape

Beta = Annotated[Float, Field(ge=0, lt=1)]
LinearName = Literal[
    "q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj",
    "gate_proj", "up_proj", "gate_up_proj", "down_proj",
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj",
    "per_layer_input_gate", "per_layer_projection",
]  # fmt: skip
FusedName = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


def _check_pattern(pattern: str) -> str:
    try:
        is_match(pattern, "")  # flags may only begin a whole expression, and this is a part of one
    except (re.error, OverflowError) as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_check_pattern)]


class LoraConfig(Schema):
    """LoRA adapters B A on the linear layers of a frozen model."""

    type: Literal["lora", "canonical_lora", "dora", "vlm_lora"] = "canonical_lora"
    """Which layers share an A. "canonical_lora": none, as in PEFT. With `backend = "megatron"` also "lora", one A for queries, keys and
    values, and one for gates and ups; "dora" adds magnitudes to that ([trainer.md](trainer.md#megatron))."""
    rank: PositiveInt = 32
    """Rank of the adapters: rows of A and columns of B. Without this table all parameters are trained."""
    alpha: PositiveFloat = 32.0
    """The adapters' output is scaled by `alpha / rank`."""
    use_rslora: Bool = False
    """Scale by `alpha / sqrt(rank)` instead: rsLoRA, for high ranks (arXiv:2312.03732)."""
    use_dora: Bool = False
    """Train a magnitude of each output, too: DoRA (arXiv:2402.09353). Merged only, and not for experts."""
    dropout: Float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapters' inputs that are dropped in training; never in rollout, nor where log-probs are only computed. Not for
    experts."""
    dropout_position: Literal["pre", "post"] = "pre"
    """With `backend = "megatron"`: "post" drops their outputs instead."""
    path: Path | None = None
    """Adapter to start from, a folder of PEFT's with the same rank, alpha, scaling and layers. Without it the policy is the model."""
    init: str = Field(default="default", pattern=r"^(default|gaussian|xavier|pissa(_niter_\d{1,2})?)$")
    """First values of A without a `path`: PEFT's "default" or "gaussian", uniform or normal with a standard deviation of `1 / rank`, or
    Megatron's "xavier", normal with `sqrt(2 / (rank + inputs))`. B is 0. With "pissa", or faster "pissa_niter_4", A and B are principal
    components of the weights ([PiSSA](../guides/lora.md#pissa)); not for experts or megatron-core."""
    target_modules: Annotated[tuple[Literal[LinearName, FusedName], ...], Field(min_length=1), Distinct] = tuple(
        name for name in get_args(LinearName) if name not in UNSERVED_LINEAR
    )
    """Linear layers that get an adapter, in every layer of the model. Those of experts: `experts`. Phi 3 has "qkv_proj" and "gate_up_proj"
    in the place of their parts, GLM 4 the latter. Latent attention has "kv_a_proj_with_mqa", "kv_b_proj" and either "q_proj", or "q_a_proj"
    and "q_b_proj". Gated delta nets have "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a" and "out_proj", which the default leaves
    out. With `backend = "megatron"` also "linear_qkv", "linear_proj", "linear_fc1" and "linear_fc2"."""
    experts: Bool = False
    """Whether the experts of a mixture get adapters, too, each its own: PEFT's `target_parameters`. Merged only."""
    tower: Bool = False
    """Whether all linear layers of a vision tower get adapters, too."""
    exclude_modules: Annotated[tuple[str, ...], Distinct] = ()
    """Linear layers without an adapter after all: whole names, or ends such as "0.self_attn.q_proj"."""
    rank_pattern: dict[Pattern, PositiveInt] = Field(default={})
    """Ranks of other layers than `rank` says, by a regular expression for the end of their name, as in `{"layers.1.*.q_proj" = 8}`."""
    alpha_pattern: dict[Pattern, PositiveFloat] = Field(default={})
    """Their `alpha`, likewise."""

    @model_validator(mode="before")
    @classmethod
    def _dora_has_magnitudes(cls, given: Any) -> Any:
        return {"use_dora": True, **given} if isinstance(given, dict) and given.get("type") == "dora" else given

    @model_validator(mode="after")
    def _starts_once(self) -> "LoraConfig":
        if self.type in ("lora", "dora") and self.use_dora is not (self.type == "dora"):
            raise ValueError(f'use_dora = {str(self.use_dora).lower()} contradicts type = "{self.type}"; remove it')
        if self.path is not None and self.init != "default":
            raise ValueError(f'init = "{self.init}" has no effect with path, which has A and B; remove one of them')
        for key, is_set in (("use_dora", self.use_dora), ("dropout", self.dropout), (f'init = "{self.init}"', self.is_pissa)):
            if self.experts and is_set:
                raise ValueError(f"{key} is not for experts, as in PEFT; remove one of them")
        if self.is_pissa and self.use_dora and self.dropout:
            raise ValueError(f'dropout is not for init = "{self.init}" with use_dora; remove one of them')
        return self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @property
    def is_fused(self) -> bool:
        """Whether layers that megatron-core computes as one share an A."""
        return self.type in ("lora", "dora")

    @property
    def is_pissa(self) -> bool:
        """Whether A and B begin as principal components, with their first values, negated, as further ranks that are never trained."""
        return self.init.startswith("pissa")

    @property
    def targets(self) -> tuple[str, ...]:
        """`target_modules`, as in checkpoints."""
        return tuple(part for name in self.target_modules for part in unfused(name))

    @property
    def excluded(self) -> tuple[str, ...]:
        """`exclude_modules`, as in checkpoints. Towers have layers of megatron-core's names."""
        return tuple(part for name in self.exclude_modules for part in ([name] if self.tower else unfused(name)))

    @property
    def unfused(self) -> "LoraConfig":
        """The same, with layers named as every backend does."""
        return self.model_copy(update={"target_modules": self.targets, "exclude_modules": self.excluded})

    def adapts(self, layer: str) -> bool:
        """Whether a linear layer of this name, such as `model.layers.0.self_attn.q_proj`, gets an adapter."""
        is_meant = self.tower if layer.startswith(TOWER) else layer.rpartition(".")[2] in self.targets
        return is_meant and not any(is_end(name, layer) for name in self.excluded)

    def layers(self, model: "ModelShape") -> dict[str, tuple[int, ...]]:
        """Linear layers that get an adapter, in the model's order, with the shapes [out, in] of their weights."""
        named = model.parameters()
        weights = {name.removesuffix(".weight"): shape for name, shape in named.items() if len(shape) == 2}
        # A tower's learned positions, a matrix without a bias, are no linear layer.
        linear = (layer for layer in weights if not layer.startswith(TOWER) or f"{layer}.bias" in named)
        return {layer: weights[layer] for layer in linear if self.adapts(layer)}

    def rank_of(self, layer: str) -> int:
        """Rank of a layer's adapter, with PiSSA's first values."""
        rank = next((rank for pattern, rank in self.rank_pattern.items() if is_match(pattern, layer)), self.rank)
        return rank * (1 + self.is_pissa)

    @property
    def max_rank(self) -> int:
        """The highest that a layer may have."""
        return max(self.rank, *self.rank_pattern.values(), 1) * (1 + self.is_pissa)

    def scaling_of(self, layer: str) -> float:
        """Factor of its output."""
        rank = self.rank_of(layer) // (1 + self.is_pissa)
        alpha = next((alpha for pattern, alpha in self.alpha_pattern.items() if is_match(pattern, layer)), self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


MAX_LEARNING_RATE = 1.0
"""One step of a larger one destroys any weights, which no later error brings back."""
LearningRate = Annotated[Float, Field(ge=0, le=MAX_LEARNING_RATE)]


class OptimizerConfig(Schema):
    """AdamW and the learning-rate schedule."""

    learning_rate: LearningRate = 1e-6
    """Peak of the policy's schedule. With adapters about ten times that of full training."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine decay to 0 at the run's end."""
    warmup_steps: Int = Field(default=0, ge=0)
    """Steps over which the rate rises from 0 to its peak."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's decay of the first and second moment."""
    # In float32 a much smaller one is 0, and a weight without a gradient becomes NaN.
    eps: Float = Field(default=1e-8, ge=1e-30)
    """AdamW's constant beside the root of the second moment."""
    weight_decay: Float = Field(default=0.0, ge=0, le=100)
    """AdamW's decoupled decay, multiplied by the learning rate."""
    max_grad_norm: PositiveFloat = 1.0
    """Norm to which the gradients of a step are clipped."""


class CriticConfig(Schema):
    """A second model that estimates the value of each token, for PPO. Schedule and AdamW are the policy's."""

    learning_rate: LearningRate = 1e-6
    """Peak of its schedule."""
    path: Path | None = None
    """Model folder of its initial weights; by default the policy's. A `value_head.weight` there initializes its head, else zeros do."""
    lora_rank: PositiveInt | None = None
    """Rank of adapters, which are trained with the head on a frozen model; `alpha` and layers are those of `[trainer.lora]`. By default
    all parameters are trained."""


class MegatronConfig(Schema):
    """Layout of the ranks with `trainer.backend = "megatron"`; data parallel is the rest."""

    tensor_parallel: PositiveInt = 1
    """Ranks that split every layer and share a micro-batch (Megatron-LM, with sequence parallelism). Must divide `trainer.num_ranks`, and
    the model's attention heads, key heads, inner size and vocabulary."""
    expert_parallel: PositiveInt = 1
    """Ranks that share the experts of every layer, each whole; tokens travel as with `trainer.expert_parallel`. Those of a tensor-parallel
    group have other experts, too. Must divide `trainer.num_ranks` and the number of experts."""


DEFAULT_MICRO_BATCH_TOKENS = {"cpu": 8192, "cuda": 16_384}
"""Default by device. On a GPU the planner may choose fewer."""


class TrainerConfig(OptimizerConfig):
    backend: Literal["fsdp", "megatron"] = "fsdp"
    """What holds the networks: FSDP2, or megatron-core, which splits layers over ranks. It needs the extra `megatron`, and has fewer models
    and settings ([trainer.md](trainer.md#megatron))."""
    megatron: MegatronConfig | None = None
    num_ranks: PositiveInt = 1
    """Number of ranks: one per GPU, or one process each on a CPU."""
    devices: Devices | None = None
    """GPU of each rank: all by number, as in `[0, 1]`, or all by UUID from nvidia-smi -L, as in `["GPU-6f1d...", "GPU-93ab..."]`. Numbers
    are relative to CUDA_VISIBLE_DEVICES if it is set. Must be set together with `rollout.devices`, which may name other GPUs, fewer or
    more. By default rank i uses GPU i."""
    sequence_parallel: PositiveInt = 1
    """Ranks that split the tokens of each micro-batch and, in attention, its heads (Ulysses). Samples may be that many times as long.
    Must divide `num_ranks` and the model's attention heads, and must divide its key heads or be a multiple of them."""
    expert_parallel: Bool = False
    """Whether each rank computes its own part of every layer's experts, and tokens travel to the ranks of their experts and back.
    Otherwise every rank gathers all experts, layer by layer. `num_ranks` must divide the number of experts. Results agree up to
    rounding. Not with `mlp_tile_tokens`."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """Action if gradients are not finite: fail the step, or discard them and report the step as skipped."""
    critic: CriticConfig | None = None
    micro_batch_tokens: Int | None = Field(default=None, gt=0, lt=2**31)
    """Maximum tokens in a micro-batch; longer samples are refused. Defaults to 8192 on a CPU. On a GPU the
    default is the largest of 16384, 8192, ... 1024 that fits, never below `rollout.context_length`, times `sequence_parallel`."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of forward and backward. The default of a configuration is float32 on a CPU without bf16 instructions (AVX512-BF16, AMX)."""
    param_dtype: Literal["bfloat16", "float32"] = "float32"
    """Dtype of trained weights, gradients and optimizer state. In bfloat16, updates below about 1/256 of a weight are lost and gradients
    of micro-batches accumulate with that rounding; memory halves. Not with `[trainer.lora]`, where adapters are float32 and the
    frozen model is in `compute_dtype`."""
    attention_backend: Literal["auto", "fa4", "varlen", "sdpa"] = "auto"
    """Attention over packed sequences: FlashAttention-4, torch's `varlen_attn`, or torch's `scaled_dot_product_attention`, which pads
    and supports every model and dtype. "auto" is the first that is installed and computes correct results at start; the log names it."""
    export_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of exported models. "auto" is `rollout.dtype`, in which rollout serves the same bits."""
    checkpointing: Literal["auto", "none", "attention", "full", "offloaded"] = "auto"
    """Tensors a layer keeps from forward to backward: everything ("none" is recomputed), its input and attention's output, its input
    only, or its input and attention's output in host memory. Later values take less GPU memory; gradients are the same. "auto" is the
    first that fits according to the planner. On a GPU with "auto" as many of the last layers as
    still fit keep everything, else the last one if it takes no further memory."""
    mlp_tile_tokens: PositiveInt | None = None
    """Tokens per tile of an MLP, which a rank computes one at a time and recomputes in backward. Makes room for long samples. By default
    one tile."""
    compile: Literal["none", "blocks"] = "none"
    """Scope of torch.compile: nothing, or every layer of the networks except attention and experts. Results agree up to rounding.
    Compilation happens at start; on a CPU it needs g++ or the compiler in CXX."""
    prefix_sharing: Literal["auto", True, False] = "auto"
    """Whether samples of one prompt in a micro-batch share its computation. Results agree up to rounding, and `micro_batch_tokens` counts
    the prompt once. "auto": where it saves operations and the attention kernel can: on a GPU, without windows and after a trial at start.
    True is refused where it cannot."""
    router_replay: Literal["auto", "old_policy", True, False] = "auto"
    """Whether tokens pass the experts in training that they passed in rollout, which then reports them; without effect on a dense model.
    The policy's losses and log-probs replay them, the reference and the critic choose their own. "auto": in RL, where the engine reports
    them: not with drafts (`speculative_algorithm`), where true is refused; on a GPU not of gpt-oss, for which true takes a slower kernel.
    "old_policy": those of the trainer's own pass for `old_log_probs`, so it needs `train.old_policy = "given"`."""
    router_aux_loss_coef: Float = Field(default=0.0, ge=0)
    """Weight of a loss that balances the load of experts: transformers' load-balancing loss over the micro-batches that all ranks compute
    at once. The policy's losses of every kind get it."""
    router_bias_update_rate: Float = Field(default=0.0, ge=0)
    """By how much each step of the policy moves the bias with which a router ranks an expert, towards even load and without a loss
    (DeepSeek V3). For routers with such a bias: DeepSeek V3, GLM 4.5 to 4.7. Not with `[trainer.lora]`."""
    train_tower: Bool = False
    """Whether a vision tower is trained with the text; by default it stays as it is. Its blocks are recomputed in backward. With
    `[trainer.lora]` see `tower` there."""
    lora: LoraConfig | None = None
    """Trains adapters on a frozen model, which is then also the reference policy."""
    reference_on_host: Bool | None = None
    """Whether the weights of the KL reference stay in host memory, pinned on a GPU, and are copied layer by layer whenever it scores.
    Otherwise they are on the GPU, and leave with the other weights. Log-probs are the same. Setting it also plans the reference. By
    default they are on the GPU if `[train]` has a KL term. Without one no memory is reserved; a client that asks for the reference may run
    out of host memory. Not with `[trainer.lora]`, where the frozen model is the reference."""
    moments: Literal["gpu", "host", "8bit"] = "gpu"
    """Where and how AdamW's moments are kept. "host": in host memory, pinned on a GPU, and streamed through the device block by block in
    each step; they take no GPU memory and stay in place during a changeover. Results are the same. "8bit": those of matrices quantized to
    8 bits in blocks of up to 256 (arXiv:2110.02861); takes a quarter of their memory and changes results."""

    @property
    def tensor_parallel(self) -> int:
        return 1 if self.megatron is None else self.megatron.tensor_parallel

    @property
    def expert_ranks(self) -> int:
        """Ranks that share the experts of a layer, each its own."""
        return self.num_ranks if self.expert_parallel else 1 if self.megatron is None else self.megatron.expert_parallel

    @property
    def spreads_experts(self) -> bool:
        return self.expert_parallel or self.expert_ranks > 1

    @property
    def ranks_per_micro_batch(self) -> int:
        """Ranks that share each micro-batch."""
        return self.sequence_parallel * self.tensor_parallel

    @property
    def optimizer_on_host(self) -> bool:
        return self.moments == "host"

    @property
    def optimizer_8bit(self) -> bool:
        return self.moments == "8bit"

    @property
    def tower_learns(self) -> bool:
        """Whether the vision tower, or adapters on it, are trained."""
        return self.train_tower or (self.lora is not None and self.lora.tower)

    @property
    def critic_optimizer(self) -> OptimizerConfig | None:
        """The policy's, with the critic's learning rate."""
        if self.critic is None:
            return None
        policy = OptimizerConfig.model_validate({name: getattr(self, name) for name in OptimizerConfig.model_fields})
        return policy.model_copy(update={"learning_rate": self.critic.learning_rate})

    @property
    def critic_lora(self) -> LoraConfig | None:
        """The critic's adapters, if it has any."""
        if self.critic is None or self.critic.lora_rank is None:
            return None
        return (self.lora or LoraConfig()).model_copy(
            update={
                "rank": self.critic.lora_rank,
                "path": None,
                "rank_pattern": {},
                "alpha_pattern": {},
                "type": "canonical_lora",
                "use_dora": False,
                "dropout": 0.0,
                "tower": False,
            }
        )

    @model_validator(mode="after")
    def _adapters_need_no_reference(self) -> "TrainerConfig":
        if self.lora is not None and self.reference_on_host is not None:
            raise ValueError("with [trainer.lora] the frozen model is the reference; remove reference_on_host")
        return self


PERFORMANCE_TRAINER_KEYS = {
    "backend", "megatron", "num_ranks", "devices",
    "expert_parallel", "reference_on_host", "export_dtype",
}  # fmt: skip
"""Settings that affect speed, memory and exported files but not results."""
