"""A node's configuration: one TOML file. Frozen; unknown keys are errors; defaults are what we run.

One table per service, so that a service reads its own and the shared keys (`state_dir`, `device`, `model`).
"""

import re
from enum import IntEnum
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from tasuki.config.checks import HEARTBEAT_S, MISSED_BEATS, check_config
from tasuki.config.engine_arguments import Argument, check_engine_arguments
from tasuki.config.table import (
    UNIX,
    Address,
    Bool,
    Bytes,
    Devices,
    Distinct,
    Float,
    Int,
    Listen,
    PositiveFloat,
    PositiveInt,
    Schema,
    Seed,
)
from tasuki.config.train_schema import SftConfig, TrainConfig
from tasuki.config.trainer_schema import DEFAULT_MICRO_BATCH_TOKENS, LoraConfig, TrainerConfig

SERVICES = ("coordinator", "trainer", "rollout")


class ModelConfig(Schema):
    path: Path
    """Hugging Face model folder with config.json, safetensors and tokenizer. Or a model of the hub, "Org/Name" or "Org/Name@revision", that
    `tasuki up` and `train` fetch into the hub's cache with the extra `hub`. From a network file system a node copies it to shared memory
    once, if that takes at most an eighth of the host's (docs/design/start-up.md)."""


class CoordinatorConfig(Schema):
    stage_timeout_s: PositiveFloat = 600.0
    """Deadline of each stage, of a collective of the trainer's ranks, and of the engine's start. A changeover waits twice as long for a
    service to restart. A process without a heartbeat for a twentieth of it, or whose command makes no progress for half of it, is
    killed and restarted; its stacks go to `state_dir`/stalls."""
    drain_grace_s: Float = Field(default=30.0, ge=0)
    """How long running requests may continue in DRAIN before they are cut."""

    @property
    def recovery_timeout_s(self) -> float:
        """Longest wait of a changeover for a service that restarts."""
        return 2 * self.stage_timeout_s

    @property
    def progress_s(self) -> float:
        """Longest time of a rank's command without progress."""
        return max(self.stall_s, self.stage_timeout_s / 2)

    @property
    def stall_s(self) -> float:
        """Longest time of a process without a heartbeat."""
        return max(MISSED_BEATS * HEARTBEAT_S, self.stage_timeout_s / 20)


class RolloutConfig(Schema):
    tp_size: PositiveInt = 1
    """GPUs over which one replica's weights are sharded by tensor parallelism."""
    dp_size: PositiveInt | None = None
    """Replicas, each with a full copy of the weights on `tp_size` GPUs; each request goes to one of them. By default as many as fit on
    `devices`, or else on the trainer's GPUs; on a CPU, 1."""
    devices: Devices | None = None
    """GPU of each engine rank, in the format of `trainer.devices`, ordered by replica."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of weights and KV cache. Its default follows the CPU as that of `trainer.compute_dtype` does."""
    context_length: PositiveInt | None = None
    """Maximum tokens of prompt plus completion; by default the model's own limit."""
    kv_ratio: Float = Field(default=0.85, gt=0, lt=1)
    """Maximum share of a GPU for weights plus KV cache (SGLang's mem_fraction_static). If `train.max_prompt_tokens` or `context_length`
    bounds the samples of a `[train]` step, the cache takes only what they need when all run at once, and the trainer may keep the rest.
    `engine.max_total_tokens` sets its tokens."""
    max_running_requests: PositiveInt | None = None
    """Maximum concurrent requests in one replica; others wait. By default 256 on a CPU. On a GPU a step's samples, at least 256, or without
    [train] as many as SGLang allows."""
    lora: Literal["merged", "adapter"] = "merged"
    """With `[trainer.lora]`: whether rollout gets full weights with the adapters merged, or the adapters alone, next to the model that
    SGLang loads at start. With "adapter" the base model stays in memory while the trainer runs."""
    engine: dict[str, Argument] = Field(default={})
    """SGLang's ServerArgs by name, such as `kv_cache_dtype = "fp8_e4m3"`, `attention_backend = "triton"` or `disable_radix_cache = true`,
    which is faster with very short prompts. `tasuki.config.engine_arguments` lists those that may be given. `tasuki plan` names
    arguments whose memory it does not count."""

    @property
    def has_engine_metrics(self) -> bool:
        """Whether rollout also has SGLang's own metrics."""
        return self.engine.get("enable_metrics") is True

    @model_validator(mode="after")
    def _engine_arguments_are_free(self) -> "RolloutConfig":
        check_engine_arguments(self.engine)
        return self


class RestartConfig(Schema):
    """Restarts of services that end or hang."""

    max_restarts: Int = Field(default=5, ge=0)
    """Restarts of one service allowed within ten minutes; the next failure stops the node. 0 stops it at the first."""


class MemoryConfig(Schema):
    """Memory that trainer and engine share in turn."""

    host_budget_bytes: Bytes | None = None
    """The memory of a node on a CPU, as if it were a GPU's: bytes, or text such as "8GB" or "512MiB". Unlimited by default. Copies of
    paused memory are not counted."""


class MetricsConfig(Schema):
    """One endpoint for the metrics of all services; see docs/reference/metrics.md."""

    listen: Address | None = None
    """Address at which the coordinator serves GET /metrics, such as "127.0.0.1:9464"; none by default. On loopback every user of the
    machine may read it. Beyond loopback it uses the TLS and credentials of `[security]`; any role suffices. SGLang's own are named
    "sglang:..."."""


class CallerRole(IntEnum):
    """Role of a caller at a port. Each role may call its own methods and those of the roles before it."""

    VIEWER = 1
    TRAINER = 2
    OPERATOR = 3
    PEER = 4

    @classmethod
    def named(cls, name: str) -> "CallerRole | None":
        return next((role for role in cls if role.label == name), None)

    @property
    def label(self) -> str:
        """Name of the role in configuration, certificates and errors."""
        return self.name.lower()


class SecurityConfig(Schema):
    """TLS and authentication of callers at ports; see docs/reference/security.md."""

    cert: Path | None = None
    """Certificate chain (PEM) of the node's ports. This and the other files are reloaded when they change."""
    key: Path | None = None
    """Unencrypted key of `cert`."""
    client_ca: Path | None = None
    """CA certificates (PEM) that sign callers' certificates. Callers without such a certificate are refused (mTLS)."""
    callers: Path | None = None
    """TOML file with the role of each caller: with `client_ca` a table `[certificates]` of lines `"spiffe://lab/alice" = "operator"`, by
    SPIFFE id, or by common name if a certificate has no id; else a table `[tokens]` of lines `TOKEN = "trainer"`, closed to other users.
    Without it `spiffe://ANY/tasuki/ROLE` has the role that it names."""
    insecure: Bool = False
    """Lets every user of the machine call loopback ports, in every role."""


class PathsConfig(Schema):
    """Folders that a caller at a port may name. Callers on a unix socket are the node's own user and may name any."""

    write: tuple[Path, ...] | None = None
    """Folders in which SaveCheckpoint and ExportModel may write and LoadCheckpoint may read. Defaults to `checkpoints` in the state folder
    and the run's `output_dir`."""
    read: tuple[Path, ...] = ()
    """Further folders from which LoadCheckpoint may read."""


TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
TRACKERS: tuple[TrackerName, ...] = get_args(TrackerName)


class TrackConfig(Schema):
    """Experiment trackers. Each follows the run's metrics.jsonl in its own process; see docs/guides/python.md."""

    to: Annotated[tuple[TrackerName, ...], Distinct] = ()
    """"tensorboard", "wandb", "mlflow", "trackio"; each needs the extra of its name. They write to `output_dir`/track; wandb uploads
    with WANDB_MODE=online, MLflow with MLFLOW_TRACKING_URI."""
    project: Annotated[str, Field(min_length=1)] = "tasuki"
    """Project (wandb, trackio) or experiment (MLflow)."""
    name: str | None = None
    """Name of the run; defaults to the name of its output folder."""


def _check_name(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name) is None:
        raise ValueError('must begin with a letter or a digit, and have up to 128 letters, digits, ".", "_" and "-"')
    return name


class FleetConfig(Schema):
    """The node's fleet; see docs/guides/several-nodes.md. `tasuki fleet up` reads it from Slurm's, Kubernetes' or torchrun's variables."""

    name: Annotated[str, AfterValidator(_check_name)]
    """Name of the fleet, the same on all nodes: letters, digits, ".", "_" and "-"."""
    num_nodes: PositiveInt
    """Number of nodes, the same on all nodes."""
    node_rank: Int = Field(ge=0)
    """Rank of this node. Node 0 leads."""
    leader: Address
    """HOST:PORT of the fleet on node 0, used by clients, nodes and the trainers' ranks."""
    attempt: Int = Field(default=0, ge=0)
    """Number of restarts of the job: Slurm's restart count, JobSet's restart-attempt label. Nodes refuse smaller numbers."""
    interface: str | None = None
    """Network interface for gradients between nodes, such as "eth0". By default gloo takes the one that routes to the leader, and NCCL
    NCCL_SOCKET_IFNAME or its own choice."""

    node_timeout_s: ClassVar[float] = 30.0
    """A node silent for this long is lost, and the job ends."""

    @model_validator(mode="after")
    def _rank_is_of_a_node(self) -> "FleetConfig":
        if self.node_rank >= self.num_nodes:
            raise ValueError(f"node_rank = {self.node_rank} needs num_nodes > {self.node_rank}, but it is {self.num_nodes}")
        return self


class NodeConfig(Schema):
    """One GPU node: its services and, optionally, what to train on it."""

    state_dir: Path
    """Private folder of the node for journal, logs and sockets. Each running node needs its own."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Hardware of trainer and rollout: host memory and cores, or NVIDIA GPUs."""
    listen: Listen = "unix"
    """"unix", or an address such as "0.0.0.0:50050" for ports beside the unix sockets in the state folder: the coordinator's, and the next
    two for trainer and rollout. Ports authenticate callers as `[security]` says."""
    seed: Seed = 0
    """Seed of new adapters, value heads, samples and the order of the dataset's lines."""
    model: ModelConfig
    coordinator: CoordinatorConfig = CoordinatorConfig()
    trainer: TrainerConfig = TrainerConfig()
    rollout: RolloutConfig = RolloutConfig()
    restart: RestartConfig = RestartConfig()
    memory: MemoryConfig = MemoryConfig()
    metrics: MetricsConfig = MetricsConfig()
    security: SecurityConfig = SecurityConfig()
    paths: PathsConfig = PathsConfig()
    train: TrainConfig | None = None
    sft: SftConfig | None = None
    track: TrackConfig = TrackConfig()
    fleet: FleetConfig | None = None

    @property
    def port_targets(self) -> dict[str, str]:
        """Addresses of the services' ports, by name; empty without `listen`."""
        if self.listen == UNIX:
            return {}
        host, _, port = self.listen.rpartition(":")
        return {name: f"{host}:{int(port) + place}" for place, name in enumerate(SERVICES)}

    @property
    def dp_size(self) -> int:
        """Number of rollout replicas."""
        rollout = self.rollout
        if rollout.dp_size is not None:
            return rollout.dp_size
        num_gpus = self.trainer.num_ranks if rollout.devices is None else len(rollout.devices)
        return 1 if self.device == "cpu" else max(1, num_gpus // rollout.tp_size)

    @property
    def most_micro_batch_tokens(self) -> int:
        """`trainer.micro_batch_tokens`, or the largest value that the planner may choose."""
        tokens = self.trainer.micro_batch_tokens
        return DEFAULT_MICRO_BATCH_TOKENS[self.device] * self.trainer.sequence_parallel if tokens is None else tokens

    @property
    def has_kl(self) -> bool:
        """Whether the run compares the policy with a KL reference."""
        return self.train is not None and (self.train.loss.kl_coef > 0 or self.train.advantages.kl_coef > 0)

    @property
    def has_reference(self) -> bool:
        """Whether weights of a KL reference are planned."""
        return self.trainer.lora is None and (self.has_kl or self.trainer.reference_on_host is not None)

    @property
    def reference_is_on_host(self) -> bool:
        """True also without a planned reference: then no GPU has room for one."""
        on_host = self.trainer.reference_on_host
        return not self.has_reference if on_host is None else on_host

    @property
    def num_engine_ranks(self) -> int:
        return self.dp_size * self.rollout.tp_size

    @property
    def node_rank(self) -> int | None:
        """The node's rank in its fleet; None without a fleet."""
        return None if self.fleet is None else self.fleet.node_rank

    @property
    def exports_parameters(self) -> bool:
        """Whether rollout reads the trainer's parameters directly, without a copy."""
        held = {self.trainer.param_dtype}
        if self.trainer.backend == "megatron":
            held.add(self.trainer.compute_dtype)  # a copy of its own
        return self.rollout.dtype in held and self.trainer.lora is None

    @property
    def export_dtype(self) -> Literal["bfloat16", "float32"]:
        """Dtype of exported models."""
        return self.rollout.dtype if self.trainer.export_dtype == "auto" else self.trainer.export_dtype

    @property
    def served_adapter(self) -> LoraConfig | None:
        """The adapter that rollout applies to its base model; None if it gets full weights."""
        return self.trainer.lora if self.rollout.lora == "adapter" else None

    @model_validator(mode="after")
    def _settings_fit_together(self) -> "NodeConfig":
        check_config(self)
        return self
