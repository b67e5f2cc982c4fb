"""What a node can be told, in one TOML file. Frozen; unknown keys are errors; defaults are what we run.

One table for each service, so a service reads its own and the shared head (`state_dir`, `device`, `model`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from tasuki.algorithms.loss_types import SettingError
from tasuki.config.constraints import FUSED_LINEAR, check_constraints
from tasuki.config.devices import Devices
from tasuki.config.engine_arguments import Argument, check_engine_arguments
from tasuki.config.fleet_schema import FleetConfig
from tasuki.config.metrics_schema import MetricsConfig
from tasuki.config.ports import check_listen
from tasuki.config.residency_schema import ResidencyConfig
from tasuki.config.security_schema import PathsConfig, SecurityConfig
from tasuki.config.sft_schema import SftConfig
from tasuki.config.table import Schema, Seed
from tasuki.config.telemetry_schema import TelemetryConfig
from tasuki.config.track_schema import TrackConfig
from tasuki.config.train_schema import TrainConfig

Listen = Annotated[str, AfterValidator(check_listen)]
Beta = Annotated[float, Field(ge=0, lt=1)]
LinearName = Literal["q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"]


def _check_kv_tokens(value: object) -> object:
    if value not in (None, "needed", "most") and (type(value) is not int or value < 1):
        raise ValueError('give "needed", "most" or a number from 1')
    return value


KvTokens = Annotated[Literal["needed", "most"] | PositiveInt, BeforeValidator(_check_kv_tokens)]


class ModelConfig(Schema):
    path: Path
    """Hugging Face model folder: config.json, safetensors, tokenizer."""


class CoordinatorConfig(Schema):
    listen: Listen = "unix"
    """"unix", or an address such as "0.0.0.0:50050" to listen on a port, too. Every service always listens on a unix socket in the state
    folder. A port asks callers for what `[security]` says; all three services need one for clients on other machines."""
    stage_timeout_s: PositiveFloat = 600.0
    """Deadline of one stage."""
    drain_grace_s: float = Field(default=30.0, ge=0)
    """How long running requests may go on in DRAIN before they are cut."""
    recovery_timeout_s: PositiveFloat = 1200.0
    """How long a changeover waits for a service that is gone to come back."""


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
    """Most tokens of the samples in one micro-batch; a longer sample is refused. By default 8192 on a CPU; on a GPU 16384, or
    the first of 8192, 4096, ... for which the planner has room, down to 1024 or `rollout.context_length`, whichever is more; times
    `sequence_parallel`."""
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
    """How a GPU's memory is given to rollout: as file descriptors of our own arenas, or a copy in torch's memory by a legacy CUDA IPC
    handle, where descriptors do not work."""
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


class RolloutConfig(Schema):
    listen: Listen = "unix"
    """As `coordinator.listen`."""
    tp_size: PositiveInt = 1
    """GPUs that share one copy of the weights, by tensor parallelism."""
    dp_size: PositiveInt | None = None
    """Replicas side by side, each with all weights on `tp_size` GPUs; a request is served by one of them. By default as many as the
    trainer's GPUs have room for, or `devices`; on a CPU one."""
    devices: Devices | None = None
    """GPU of each engine rank, as `trainer.devices`: those of the first replica first."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    float32_logits: bool = True
    """Whether the vocabulary projection gives float32 logits in place of bfloat16 ones, without a copy of the weight; log-probs come closer
    to the trainer's then. Needs a GPU: torch has no such product on a CPU, where `dtype` decides."""
    context_length: PositiveInt | None = None
    """Longest prompt plus completion; by default the model's own."""
    kv_tokens: KvTokens | None = None
    """Tokens in a replica's KV cache: a number, what `kv_ratio` leaves of a GPU ("most"), or what the samples of a step of `[train]` take
    when all run at once ("needed"), never more than "most". By default "needed" where `train.max_prompt_tokens` or `context_length` tells
    how long they are. What the cache does not take, the trainer may keep."""
    kv_ratio: float = Field(default=0.85, gt=0, lt=1)
    """Share of a GPU that weights and KV cache may take together (SGLang's mem_fraction_static)."""
    max_running_requests: PositiveInt | None = None
    """Of one replica."""
    radix_cache: bool = True
    """Whether samples share the KV of a common prefix (SGLang's radix cache). With prompts of a few tokens it costs more than it saves."""
    attention_backend: Literal["fa3", "flashinfer", "triton"] | None = None
    """SGLang's attention kernels on a GPU; by default those that it chooses for the card."""
    sampling_backend: Literal["flashinfer", "pytorch"] | None = None
    """SGLang's sampling kernels on a GPU; by default its own choice."""
    full_read_back: bool = False
    """At every sync, and not only at a plan's first, weights are read back once more after all copies."""
    lora: Literal["merged", "adapter"] = "merged"
    """With `[trainer.lora]`: whole weights with the adapters merged in, or adapters alone beside the model as SGLang loads it at its start,
    which then stays in memory while the trainer runs."""
    start_timeout_s: PositiveFloat = 600.0
    num_threads: PositiveInt = 1
    """Torch threads for each engine rank on a CPU."""
    seed: Seed = 0
    engine: dict[str, Argument] = Field(default={})
    """Further arguments of SGLang's ServerArgs by their names, such as `kv_cache_dtype = "fp8_e4m3"`. Those that tasuki sets are refused,
    with the key to use. `tasuki plan` names those that it does not count."""

    @model_validator(mode="after")
    def _engine_arguments_are_free(self) -> RolloutConfig:
        check_engine_arguments(self.engine)
        return self


class RestartConfig(Schema):
    """What becomes of a service that ends or hangs."""

    max_restarts: int = Field(default=5, ge=0)
    """Restarts of one service within `window_s`; when it ends once more the node stops. 0: it stops at the first end."""
    window_s: PositiveFloat = 600.0
    stall_s: PositiveFloat = 30.0
    """A process whose heartbeat has not moved for so long is killed and restarted, its stacks in `state_dir`/stalls."""
    progress_s: PositiveFloat = 300.0
    """The same for the progress of a command that a rank carries out: a micro-batch, a copy of weights, a file."""


class MemoryConfig(Schema):
    """What a node on a CPU may take."""

    host_budget_bytes: Annotated[ByteSize, Field(gt=0)] | None = None
    """Memory that trainer and engine share in turn, as they would a GPU's: bytes, or text such as "8GB" or "512MiB"; none by default, so
    that only the machine's memory is the limit. Copies of what sleeps are not counted."""
    pool: bool = False
    """Whether this memory is made once, when the node starts, and lent to trainer and engine in turn, instead of made and given back at
    every changeover. Needs `host_budget_bytes`, which is then taken for as long as the node runs."""


class NodeConfig(Schema):
    """One GPU node: its services, and optionally what to train on it."""

    state_dir: Path
    """Private folder of the node: journal, logs, sockets. One running node a folder."""
    device: Literal["cpu", "cuda"] = "cpu"
    model: ModelConfig
    coordinator: CoordinatorConfig = CoordinatorConfig()
    trainer: TrainerConfig = TrainerConfig()
    rollout: RolloutConfig = RolloutConfig()
    restart: RestartConfig = RestartConfig()
    memory: MemoryConfig = MemoryConfig()
    metrics: MetricsConfig = MetricsConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    residency: ResidencyConfig | None = None
    security: SecurityConfig = SecurityConfig()
    paths: PathsConfig = PathsConfig()
    train: TrainConfig | None = None
    sft: SftConfig | None = None
    track: TrackConfig = TrackConfig()
    fleet: FleetConfig | None = None
    unsafe: bool = False
    """Whether `failpoints` may be set."""
    failpoints: tuple[str, ...] = ()
    """Faults for tests of recovery, such as "rollout@SYNC=kill"; see docs/recovery.md."""

    @property
    def dp_size(self) -> int:
        """How many replicas rollout has."""
        rollout = self.rollout
        if rollout.dp_size is not None:
            return rollout.dp_size
        num_gpus = self.trainer.num_ranks if rollout.devices is None else len(rollout.devices)
        return 1 if self.device == "cpu" else max(1, num_gpus // rollout.tp_size)

    @property
    def most_micro_batch_tokens(self) -> int:
        """`trainer.micro_batch_tokens`, or the most that it may be where the planner chooses."""
        tokens = self.trainer.micro_batch_tokens
        return DEFAULT_MICRO_BATCH_TOKENS[self.device] * self.trainer.sequence_parallel if tokens is None else tokens

    @property
    def num_engine_ranks(self) -> int:
        return self.dp_size * self.rollout.tp_size

    @property
    def exports_parameters(self) -> bool:
        """Whether rollout reads the trainer's parameters themselves."""
        trainer = self.trainer
        is_possible = trainer.param_dtype == self.rollout.dtype and trainer.export_handles == "vmm" and trainer.lora is None
        return trainer.export == "parameters" or (trainer.export == "auto" and is_possible)

    @property
    def served_adapter(self) -> LoraConfig | None:
        """What rollout adds to the model by itself; None when weights come whole."""
        return self.trainer.lora if self.rollout.lora == "adapter" else None

    @model_validator(mode="after")
    def _settings_fit_together(self) -> NodeConfig:
        check_constraints(self)
        return self
