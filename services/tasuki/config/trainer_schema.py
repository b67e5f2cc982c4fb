"""The trainer's table of a node's configuration: optimizers, adapters, critic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tasuki.algorithms.effects import check_effects
from tasuki.algorithms.loss_types import SettingError
from tasuki.config.constraints import FUSED_LINEAR
from tasuki.config.devices import Devices
from tasuki.config.table import Listen, Schema, Seed

Beta = Annotated[float, Field(ge=0, lt=1)]
LinearName = Literal["q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"]


class LoraConfig(Schema):
    """Adapters B A beside the linear layers of a frozen model."""

    rank: PositiveInt = 32
    """Rows of A and columns of B. Without this table every parameter is trained."""
    alpha: PositiveFloat = 32.0
    """An adapter's product counts `alpha / rank` times."""
    target_modules: Annotated[tuple[LinearName, ...], Field(min_length=1)] = tuple(
        name for name in get_args(LinearName) if name not in FUSED_LINEAR
    )
    """Linear layers that get an adapter, in every layer of the model. Experts cannot have any. Phi 3 has "qkv_proj" and "gate_up_proj"
    in the place of their parts, GLM 4 the latter."""
    share_base: bool = False
    """Whether trainer and engine read one copy of the frozen model, which the engine loads and neither can write to. Needs
    `rollout.lora = "adapter"`, one trainer rank, one engine rank on the same GPU, and `trainer.compute_dtype` to be `rollout.dtype`; not
    for mixtures of experts."""

    @model_validator(mode="after")
    def _targets_differ(self) -> LoraConfig:
        if len(set(self.target_modules)) < len(self.target_modules):
            raise ValueError("target_modules names one of them twice")
        return self


class OptimizerConfig(Schema):
    """AdamW and the schedule of one role."""

    learning_rate: float = Field(default=1e-6, ge=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine fall to 0 at `total_steps`."""
    warmup_steps: int = Field(default=0, ge=0)
    total_steps: PositiveInt | None = None
    """Length of the schedule; needed unless it is constant."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _schedule_has_length(self) -> OptimizerConfig:
        if self.lr_schedule != "constant" and self.total_steps is None:
            raise ValueError("total_steps is needed with lr_schedule = linear or cosine")
        if self.total_steps is not None and self.warmup_steps > self.total_steps:
            problem = (
                f"is {self.warmup_steps}, above total_steps = {self.total_steps}: the schedule would end before its warm-up"
            )
            raise SettingError("warmup_steps", problem)
        has_end = self.lr_schedule != "constant"
        check_effects([("total_steps", self.total_steps, None, has_end, 'use lr_schedule = "linear" or "cosine"')])
        return self


class CriticConfig(OptimizerConfig):
    """A second model, which gives values to tokens; for PPO."""

    path: Path | None = None
    """Model folder of its start weights; by default the policy's. A `value_head.weight` there is its head, which else starts at 0."""
    lora: LoraConfig | None = None
    """Trains adapters and the head beside a frozen model."""


DEFAULT_MICRO_BATCH_TOKENS = {"cpu": 8192, "cuda": 16_384}
"""By device. On a GPU the planner may choose fewer."""


class TrainerConfig(OptimizerConfig):
    listen: Listen = "unix"
    """As `coordinator.listen`."""
    num_ranks: PositiveInt = 1
    """FSDP2 ranks; one GPU each, or one process each on a CPU."""
    devices: Devices | None = None
    """GPU of each rank: all by number, as in `[0, 1]`, or all by UUID of nvidia-smi -L, as in `["GPU-6f1d...", "GPU-93ab..."]`. Numbers
    count within CUDA_VISIBLE_DEVICES where that is set. Goes with `rollout.devices`, which may name other GPUs, fewer or more. By default
    rank i is on GPU i."""
    num_threads: PositiveInt = 1
    """Torch threads for each rank on a CPU."""
    sequence_parallel: PositiveInt = 1
    """Ranks that share the tokens of each micro-batch, and in attention its heads (Ulysses): a sample may be so many times as long. It
    divides `num_ranks` and the model's attention heads, and divides its key heads or is a multiple of them."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """What gradients that are not finite do: fail the step, or drop them and count the step as skipped."""
    critic: CriticConfig | None = None
    micro_batch_tokens: PositiveInt | None = None
    """Most tokens of the samples in one micro-batch; a longer sample is refused. By default 8192 on a CPU. On a GPU it
    is the first of 16384, 8192, ... for which the planner has room, and at least 1024 and `rollout.context_length`. The default is
    taken times `sequence_parallel`."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of forward and backward."""
    param_dtype: Literal["bfloat16", "float32"] = "float32"
    """Dtype of the weights that are trained, of their gradients and of the optimizer state. In bfloat16 an update below about 1/256 of a
    weight is lost, gradients of micro-batches add up with that rounding, too, and all four take half the memory. Not with
    `[trainer.lora]`: adapters are float32, the frozen model `compute_dtype`."""
    export: Literal["auto", "parameters", "copy"] = "auto"
    """What rollout reads at a sync: the parameters themselves, which takes no memory and needs `param_dtype` to be `rollout.dtype`, or a
    copy in that dtype. "auto" is "parameters" where that is possible."""
    export_stays: bool | None = None
    """Whether what rollout reads (the copy, or the parameters) stays on the GPU over OFFLOAD. If not, it leaves, and rollout maps it at
    every sync. By default it stays where the planner says that everything fits then."""
    export_handles: Literal["vmm", "ipc"] = "vmm"
    """How a GPU's memory is given to rollout: our arenas' descriptors, or, where these do not work, a copy in torch's
    memory by a legacy CUDA IPC handle."""
    attention_backend: Literal["auto", "fa4", "varlen", "sdpa"] = "auto"
    """Attention over packed sequences: FlashAttention-4, torch's `varlen_attn`, or torch's `scaled_dot_product_attention`, which pads
    inside and takes every model and dtype. "auto" is the first that is there and computes right when the trainer starts; the log says
    which."""
    checkpointing: Literal["auto", "none", "attention", "full", "offloaded"] = "auto"
    """What is kept of each layer from forward to backward: everything ("none" is recomputed), its input and attention's output, its input
    alone, or that in host memory. A later one takes less memory and more time, and computes the same gradients. "auto" is the first
    that the planner has room for; on a GPU as many layers as then fit keep everything."""
    mlp_tile_tokens: PositiveInt | None = None
    """Tokens of which a rank computes an MLP at a time; in backward each tile is computed again. It makes room for long samples. By
    default all tokens at once."""
    compile: Literal["none", "blocks"] = "none"
    """What torch.compile makes kernels of: nothing, or every layer of the networks, but for attention and experts. Results are equal up
    to rounding. The trainer compiles when it starts: on a CPU with g++, or the compiler that CXX names."""
    prefix_sharing: Literal["auto"] | bool = False
    """Whether samples of one prompt in a micro-batch compute the prompt once. Results are equal up to rounding, and `micro_batch_tokens`
    counts it once. "auto": on a CPU where that takes fewer operations, on a GPU never. On a GPU true is refused where attention has
    windows, or where its kernel fails a trial at start."""
    lora: LoraConfig | None = None
    """Trains adapters beside a frozen model, which is then also the reference policy."""
    optimizer_on_host: bool = False
    """Whether AdamW's moments stay in host memory, pinned on a GPU, and pass through the device a block at a time in each step. They then
    take no GPU memory and no part in a changeover; the numbers are the same."""
    optimizer_8bit: bool = False
    """Whether AdamW's moments of matrices are rounded to 8 bits in blocks of up to 256 (arXiv:2110.02861): a quarter of their memory, and
    other numbers. Not with `optimizer_on_host`."""
    collective_timeout_s: PositiveFloat = 600.0
    """Time-out of every process group; a rank that is lost is noticed after this."""
    seed: Seed = 0

    @model_validator(mode="after")
    def _ipc_handles_are_for_copies_that_stay(self) -> TrainerConfig:
        if self.export_handles == "ipc" and (self.export == "parameters" or self.export_stays is False):
            raise ValueError(
                'export_handles = "ipc" is for a copy that stays: not with export = "parameters" or export_stays = false'
            )
        return self

    @model_validator(mode="after")
    def _moments_are_kept_one_way(self) -> TrainerConfig:
        if self.optimizer_8bit and self.optimizer_on_host:
            raise ValueError("give optimizer_8bit or optimizer_on_host, not both")
        return self
