"""What a node can be told, in one TOML file. Frozen; unknown keys are errors; defaults are what we run.

One table for each service, so a service reads its own and the shared head (`state_dir`, `device`, `model`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from tasuki.config.constraints import check_constraints
from tasuki.config.devices import Devices
from tasuki.config.engine_arguments import Argument, check_engine_arguments
from tasuki.config.fleet_schema import FleetConfig
from tasuki.config.metrics_schema import MetricsConfig
from tasuki.config.residency_schema import ResidencyConfig
from tasuki.config.security_schema import PathsConfig, SecurityConfig
from tasuki.config.sft_schema import SftConfig
from tasuki.config.table import Listen, Schema, Seed
from tasuki.config.telemetry_schema import TelemetryConfig
from tasuki.config.track_schema import TrackConfig
from tasuki.config.train_schema import TrainConfig
from tasuki.config.trainer_schema import DEFAULT_MICRO_BATCH_TOKENS, LoraConfig, TrainerConfig


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
    """Tokens in a replica's KV cache. "most" is what `kv_ratio` leaves of a GPU; "needed" is what the samples of a step of `[train]` take
    when all run at once, and never more than "most". By default "needed" where `train.max_prompt_tokens` or `context_length` tells
    how long they are. What the cache does not take, the trainer may keep."""
    kv_ratio: float = Field(default=0.85, gt=0, lt=1)
    """Share of a GPU that weights and KV cache may take together (SGLang's mem_fraction_static)."""
    kv_growth: bool = False
    """Whether rollout serves as soon as the KV cache of one longest request is mapped, and maps more as requests need it and memory becomes
    free. The trainer's state then leaves behind OFFLOAD's answer. On a CPU with `memory.host_budget_bytes` it needs `memory.pool`."""
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
    """With `[trainer.lora]`: whole weights with the adapters merged in, or adapters alone, beside the model as SGLang loads it at its
    start. The model then stays in memory while the trainer runs."""
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
    """Memory that trainer and engine share in turn, as they would a GPU's: bytes, or text such as "8GB" or "512MiB". By default only the
    machine's memory is the limit. Copies of what sleeps are not counted."""
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
    def node_rank(self) -> int | None:
        """In the fleet; None without one."""
        return None if self.fleet is None else self.fleet.node_rank

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

    @property
    def shares_base(self) -> bool:
        """Whether trainer and engine read one copy of the model below the adapters."""
        return self.trainer.lora is not None and self.trainer.lora.share_base

    @model_validator(mode="after")
    def _settings_fit_together(self) -> NodeConfig:
        check_constraints(self)
        return self
