"""Constraints between settings: the order of deadlines, and settings for one kind of device only."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from tasuki.config.devices import MAX_GPUS, UUID
from tasuki.config.failpoints import check_failpoint, parse_failpoint
from tasuki.config.ports import port_problem, shared_port_problem

if TYPE_CHECKING:
    from tasuki.config.schema import NodeConfig

FUSED_LINEAR = ("qkv_proj", "gate_up_proj")
"""Fused linear layers, for which SGLang supports adapters on the parts only."""
HEARTBEAT_S = 0.25
"""Interval of a process's heartbeat."""
MISSED_BEATS = 4
"""Missing heartbeats after which a process counts as hung, at least."""


class SettingsConflict(ValueError):
    """Two settings that conflict. `field` is the one to change first."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


def check_constraints(config: NodeConfig) -> None:
    """Raises SettingsConflict naming both settings."""
    _check_export(config)
    _check_num_ranks(config)
    _check_devices(config)
    _check_kind_of_device(config)
    if config.rollout.lora == "adapter" and config.trainer.lora is None:
        raise SettingsConflict("rollout.lora", '= "adapter" needs a table [trainer.lora]')
    if config.trainer.kept_layers is not None and config.trainer.checkpointing == "none":
        raise SettingsConflict(
            "trainer.kept_layers", 'has no use with trainer.checkpointing = "none": every layer keeps everything'
        )
    fused = [name for name in FUSED_LINEAR if config.served_adapter and name in config.served_adapter.target_modules]
    if fused:
        raise SettingsConflict("rollout.lora", f'= "adapter" cannot serve adapters of {", ".join(fused)}; leave it at "merged"')
    _check_shared_base(config)
    if config.rollout.kv_tokens == "needed" and config.train is None:
        raise SettingsConflict("rollout.kv_tokens", '= "needed" needs a table [train], which defines the samples of a step')
    _check_residency(config)
    _check_critic(config)
    _check_failpoints(config)
    problem = shared_port_problem(config) or port_problem(config)
    if problem is not None:
        raise SettingsConflict(*problem)


def _check_shared_base(config: NodeConfig) -> None:
    trainer, rollout, key = config.trainer, config.rollout, "trainer.lora.share_base"
    critic_lora = None if trainer.critic is None else trainer.critic.lora
    if critic_lora is not None and critic_lora.share_base:
        raise SettingsConflict("trainer.critic.lora.share_base", "is not possible: the engine has no critic; leave it out")
    if not config.shares_base:
        return
    if rollout.lora != "adapter":
        raise SettingsConflict(
            key, f'needs rollout.lora = "adapter": with "{rollout.lora}" the engine\'s weights change at every sync'
        )
    if trainer.compute_dtype != rollout.dtype:
        raise SettingsConflict(
            key, f"needs trainer.compute_dtype = {trainer.compute_dtype} to be rollout.dtype = {rollout.dtype}"
        )
    for field, num_ranks, needed in (
        ("rollout.tp_size", rollout.tp_size, trainer.num_ranks),
        ("rollout.dp_size", config.dp_size, 1),
    ):
        if num_ranks != needed:
            ranks = f"with trainer.num_ranks = {trainer.num_ranks}, not {num_ranks}"
            raise SettingsConflict(key, f"needs {field} = {needed} {ranks}: a trainer rank reads one engine rank's slices")
    if trainer.devices != rollout.devices:
        raise SettingsConflict(key, "needs trainer.devices and rollout.devices to name the same GPUs in the same order")
    if config.memory.host_budget_bytes is not None:
        raise SettingsConflict(
            key, "is not for memory.host_budget_bytes, which counts what one process has made; leave one of them out"
        )


def _check_residency(config: NodeConfig) -> None:
    residency, trainer = config.residency, config.trainer
    if residency is None:
        return
    for name, given, num_ranks in (
        ("trainer", residency.trainer, trainer.num_ranks),
        ("rollout", residency.rollout, config.num_engine_ranks),
    ):
        if len(given) > num_ranks:
            raise SettingsConflict(f"residency.{name}", f"names {len(given)} ranks, and {name} has {num_ranks}")
    if len({"export" in residency.of_trainer(rank) for rank in range(trainer.num_ranks)}) > 1:
        raise SettingsConflict("residency.trainer", "has export for some ranks only; it stays on all of them or on none")


def _check_critic(config: NodeConfig) -> None:
    uses_critic = config.train is not None and config.train.advantages.estimator == "gae"
    if uses_critic and config.trainer.critic is None:
        raise SettingsConflict("train.advantages.estimator", '= "gae" needs a critic: add a table [trainer.critic]')
    if config.trainer.critic is not None and config.train is not None and not uses_critic:
        raise SettingsConflict("trainer.critic", 'is set, but nothing trains it; set train.algorithm = "ppo", or remove it')
    if config.trainer.critic is not None and config.sft is not None and config.train is None:
        raise SettingsConflict("trainer.critic", "is set, but [sft] trains only the policy; remove it")


def _check_failpoints(config: NodeConfig) -> None:
    if config.failpoints and not config.unsafe:
        raise SettingsConflict("failpoints", "break a node on purpose and need unsafe = true")
    for spec in config.failpoints:
        try:
            check_failpoint(parse_failpoint(spec), config)
        except ValueError as error:
            raise SettingsConflict("failpoints", f"has {spec!r}, which {error}") from error


def _check_export(config: NodeConfig) -> None:
    trainer, dtype = config.trainer, config.rollout.dtype
    if trainer.export == "parameters" and trainer.param_dtype != dtype:
        problem = f'= "parameters" needs trainer.param_dtype = {trainer.param_dtype} to be rollout.dtype = {dtype}'
        raise SettingsConflict("trainer.export", f'{problem}; "copy" casts')
    if trainer.export == "parameters" and trainer.lora is not None:
        raise SettingsConflict("trainer.export", '= "parameters" cannot publish adapters; leave it at "auto"')
    if trainer.param_dtype != "float32" and trainer.lora is not None:
        raise SettingsConflict(
            "trainer.param_dtype", f'= "{trainer.param_dtype}" is not for [trainer.lora]: adapters are trained in float32'
        )


def _check_num_ranks(config: NodeConfig) -> None:
    for field, num_ranks in (
        ("trainer.num_ranks", config.trainer.num_ranks),
        ("rollout.tp_size", config.rollout.tp_size),
        ("rollout.dp_size", config.num_engine_ranks),
    ):
        if num_ranks > MAX_GPUS:
            raise SettingsConflict(field, f"makes {num_ranks} ranks; one node has at most {MAX_GPUS}")
    trainer = config.trainer
    if trainer.num_ranks % trainer.sequence_parallel:
        problem = f"= {trainer.sequence_parallel} does not divide trainer.num_ranks = {trainer.num_ranks}"
        raise SettingsConflict("trainer.sequence_parallel", problem)
    if trainer.expert_parallel and trainer.num_ranks == 1:
        raise SettingsConflict("trainer.expert_parallel", "= true needs trainer.num_ranks above 1: one rank has all experts")
    if trainer.expert_parallel and trainer.mlp_tile_tokens is not None:
        problem = f"= {trainer.mlp_tile_tokens} is not for trainer.expert_parallel = true, whose ranks would exchange unequal "
        raise SettingsConflict("trainer.mlp_tile_tokens", f"{problem}numbers of tiles; remove one of them")


def _check_devices(config: NodeConfig) -> None:
    """Requires GPUs to be named for all ranks of both services or for none."""
    named = {
        "trainer": (config.trainer.devices, config.trainer.num_ranks),
        "rollout": (config.rollout.devices, config.num_engine_ranks),
    }
    given = {service: devices for service, (devices, _) in named.items() if devices is not None}
    if not given:
        return
    needs = [f"{service}.devices, too" for service in named if service not in given]
    if config.device == "cpu":
        needs.append('device = "cuda"')
    if needs:
        raise SettingsConflict(f"{next(iter(given))}.devices", f"needs {', and '.join(needs)}")
    for service, (devices, num_ranks) in named.items():
        if devices is not None and len(devices) != num_ranks:
            raise SettingsConflict(f"{service}.devices", f"names {len(devices)} GPUs for {num_ranks} ranks")
    names = sorted({name for devices in given.values() for name in devices})
    if len({name.startswith(UUID) for name in names}) > 1:
        raise SettingsConflict("trainer.devices", "and rollout.devices are UUIDs or numbers, not both")
    for name, longer in pairwise(names):
        if name.startswith(UUID) and longer.startswith(name):  # CUDA accepts a prefix of a UUID
            raise SettingsConflict("trainer.devices", f"and rollout.devices name one GPU in two ways, {name} and {longer}")


def _check_kind_of_device(config: NodeConfig) -> None:
    if config.device == "cpu" and config.trainer.attention_backend in ("fa4", "varlen"):
        problem = f'= "{config.trainer.attention_backend}" needs device = "cuda": leave it out'
        raise SettingsConflict("trainer.attention_backend", problem)
    if config.device == "cpu" and "speculative_algorithm" in config.rollout.engine:
        problem = 'needs device = "cuda": SGLang does not speculate on a CPU; leave it out'
        raise SettingsConflict("rollout.engine.speculative_algorithm", problem)
    if config.device == "cuda" and config.rollout.dtype == "float32":
        raise SettingsConflict(
            "rollout.dtype",
            '= "float32" is not possible with device = "cuda", where SGLang\'s kernels take bfloat16: leave it out',
        )
    if config.device == "cuda" and config.memory.host_budget_bytes is not None:
        raise SettingsConflict("memory.host_budget_bytes", 'is for device = "cpu"; the memory of a GPU is measured')
