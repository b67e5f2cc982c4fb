"""Checks across keys, model and machine."""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from tasuki.algorithms.loss_types import OldPolicy
from tasuki.config.engine_arguments import MAX_TOKENS
from tasuki.config.table import MAX_GPUS, UNIX, UUID
from tasuki.models.adapter_folder import check_adapter, is_end, is_match
from tasuki.models.families import find_family
from tasuki.models.shape import EXPERTS
from tasuki.wire.address import is_beyond_loopback, is_same_port
from tasuki.wire.errors import InvalidArgument

if TYPE_CHECKING:
    from tasuki.config.gpus import Gpus
    from tasuki.config.schema import NodeConfig
    from tasuki.config.trainer_schema import LoraConfig
    from tasuki.models.shape import ModelShape

UNSERVED_LINEAR = (
    "qkv_proj", "gate_up_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "in_proj_qkv", "in_proj_z", "in_proj_b",
    "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj",
)  # fmt: skip
"""Linear layers of a few families, for which SGLang serves no adapters: fused ones, and those of latent attention."""
HEARTBEAT_S = 0.25
"""Interval of a process's heartbeat."""
MISSED_BEATS = 4
"""Missing heartbeats after which a process counts as hung, at least."""


class SettingsConflict(ValueError):
    """Two settings that conflict. `field` is the one to change first."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


def check_config(config: "NodeConfig") -> None:
    """Raises SettingsConflict naming both settings."""
    if config.trainer.param_dtype != "float32" and config.trainer.lora is not None:
        problem = f'= "{config.trainer.param_dtype}" is not for [trainer.lora]: adapters are trained in float32'
        raise SettingsConflict("trainer.param_dtype", problem)
    _check_num_ranks(config)
    _check_devices(config)
    _check_kind_of_device(config)
    if config.rollout.lora == "adapter" and config.trainer.lora is None:
        raise SettingsConflict("rollout.lora", '= "adapter" needs a table [trainer.lora]')
    if config.trainer.lora is not None and config.trainer.lora.dropout:
        _check_dropout(config)
    for key, what in (("experts", "adapters of experts"), ("use_dora", "DoRA")):
        if config.served_adapter is not None and getattr(config.served_adapter, key):
            problem = f'= "adapter" cannot serve {what} (trainer.lora.{key}); leave it at "merged"'
            raise SettingsConflict("rollout.lora", problem)
    unserved = [name for name in UNSERVED_LINEAR if config.served_adapter and name in config.served_adapter.target_modules]
    if unserved:
        problem = f'= "adapter" cannot serve adapters of {", ".join(unserved)}; leave it at "merged"'
        raise SettingsConflict("rollout.lora", problem)
    if config.trainer.lora is not None and config.trainer.lora.path is not None and config.has_kl:
        problem = "starts the policy, but the KL reference would be the model without it; "
        raise SettingsConflict("trainer.lora.path", f"{problem}merge it into the model with PEFT, or set kl_coef = 0")
    _check_critic(config)
    _check_folders(config)
    if (found := port_problem(config)) is not None:
        raise SettingsConflict(*found)


def _check_critic(config: "NodeConfig") -> None:
    uses_critic = config.train is not None and config.train.advantages.estimator == "gae"
    if uses_critic and config.trainer.critic is None:
        raise SettingsConflict("train.advantages.estimator", '= "gae" needs a critic: add a table [trainer.critic]')
    if config.trainer.critic is not None and config.train is not None and not uses_critic:
        raise SettingsConflict("trainer.critic", 'is set, but nothing trains it; set train.algorithm = "ppo", or remove it')
    if config.sft is not None and config.train is not None:
        raise SettingsConflict("sft", "is in one file with [train]; put them into two files")
    if config.trainer.critic is not None and config.sft is not None:
        raise SettingsConflict("trainer.critic", "is set, but [sft] trains only the policy; remove it")


def _check_folders(config: "NodeConfig") -> None:
    """Refuses an output folder in the model's, whose files an export copies, or in place of the data."""
    for table, run in (("train", config.train), ("sft", config.sft)):
        if run is None:
            continue
        given = {"model.path": config.model.path, f"{table}.dataset": run.dataset, f"{table}.eval_dataset": run.eval_dataset}
        for key, path in given.items():
            if path is None or not path.is_absolute():  # an id of the hub
                continue
            if Path(os.path.realpath(run.output_dir)).is_relative_to(os.path.realpath(path)):
                raise SettingsConflict(f"{table}.output_dir", f"is in {key}, {path}; choose a folder of its own for the run")


def _check_num_ranks(config: "NodeConfig") -> None:
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


def _check_devices(config: "NodeConfig") -> None:
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


def _check_kind_of_device(config: "NodeConfig") -> None:
    if config.device == "cpu" and config.trainer.attention_backend in ("fa4", "varlen"):
        problem = f'= "{config.trainer.attention_backend}" needs device = "cuda": leave it out'
        raise SettingsConflict("trainer.attention_backend", problem)
    speculates, key = "speculative_algorithm" in config.rollout.engine, "rollout.engine.speculative_algorithm"
    if config.trainer.router_replay is True and speculates:
        problem = f"= true is not for {key}: SGLang's drafts overflow its routes; remove one of them"
        raise SettingsConflict("trainer.router_replay", problem)
    if config.device == "cpu" and speculates:
        raise SettingsConflict(key, 'needs device = "cuda": SGLang does not speculate on a CPU; leave it out')
    if config.device == "cuda" and config.rollout.dtype == "float32":
        problem = '= "float32" is not possible with device = "cuda", where SGLang\'s kernels take bfloat16: leave it out'
        raise SettingsConflict("rollout.dtype", problem)
    if config.device == "cuda" and config.memory.host_budget_bytes is not None:
        raise SettingsConflict("memory.host_budget_bytes", 'is for device = "cpu"; the memory of a GPU is measured')


def replays_routes(config: "NodeConfig", model: "ModelShape") -> bool:
    """Whether the policy replays the experts of rollout. "auto" does for a mixture in RL, where its engine can report them."""
    replay, drafts = config.trainer.router_replay, "speculative_algorithm" in config.rollout.engine
    if replay == "auto":
        has_other_kernel = config.device == "cuda" and model.architecture == "GptOssForCausalLM"
        replay = config.sft is None and model.delta is None and not drafts and not has_other_kernel
    return replay and model.num_experts > 0


def check_model(config: "NodeConfig", model: "ModelShape", *, critic: "ModelShape | None" = None) -> None:
    """Raises InvalidArgument for settings that these models cannot have."""
    trainer, rollout = config.trainer, config.rollout
    if critic is not None:
        check_critic_model(config, model, critic)
    if trainer.lora is not None:
        check_lora_targets(model, trainer.lora.target_modules)
        _check_lora_layers(trainer.lora, model)
        _check_lora_experts(config, [model] if critic is None else [model, critic])
        if trainer.lora.path is not None:
            check_adapter(trainer.lora.path, model, trainer.lora)
    if config.served_adapter is not None and model.latent is not None:
        problem = f'= "adapter" is not for latent attention, which {model.architecture} has; leave it at "merged"'
        raise InvalidArgument("rollout.lora", problem)
    if critic is not None and trainer.critic_lora is not None:
        check_lora_targets(critic, trainer.critic_lora.target_modules)
    if model.num_heads % rollout.tp_size:
        problem = f"{model.num_heads} attention heads cannot be split over {rollout.tp_size} ranks"
        raise InvalidArgument("rollout.tp_size", problem)
    models, shared = [model] if critic is None else [model, critic], trainer.sequence_parallel
    _check_delta_nets(config, models)
    _check_towers(config, models)
    for each in models:
        heads, kv_heads = each.num_heads, each.num_kv_heads
        if heads % shared:
            raise InvalidArgument("trainer.sequence_parallel", f"{shared} ranks cannot share {heads} attention heads evenly")
        if kv_heads % shared and shared % kv_heads:
            problem = f"{shared} ranks can neither share {kv_heads} key heads evenly, nor have one of them each"
            raise InvalidArgument("trainer.sequence_parallel", problem)
    if trainer.router_aux_loss_coef and not model.num_experts:
        raise InvalidArgument("trainer.router_aux_loss_coef", f"{model.architecture} has no experts to balance; remove it")
    if trainer.router_bias_update_rate and (not model.has_router_bias or trainer.lora is not None):
        what = "adapters train no router" if model.has_router_bias else f"{model.architecture} has no router with a bias"
        raise InvalidArgument("trainer.router_bias_update_rate", f"{what}; remove it")
    sparse = [one for one in models if one.num_experts]
    if trainer.expert_parallel and not sparse:
        raise InvalidArgument("trainer.expert_parallel", f"{model.architecture} has no experts to spread; remove it")
    for one in sparse if trainer.expert_parallel else ():
        if one.num_experts % trainer.num_ranks:
            problem = f"{trainer.num_ranks} ranks cannot share {one.num_experts} experts of {one.architecture} evenly"
            advice = "give a number of ranks that divides them, or remove it"
            raise InvalidArgument("trainer.expert_parallel", f"{problem}; {advice}")
    tokens, longest = rollout.engine.get(MAX_TOKENS), rollout.context_length or model.context_length
    if longest > model.context_length:
        problem = f"{longest} is more than the model's {model.context_length} positions"
        raise InvalidArgument("rollout.context_length", problem)
    if isinstance(tokens, int) and tokens < longest:
        raise InvalidArgument(
            f"rollout.engine.{MAX_TOKENS}",
            f"= {tokens} cannot hold one sequence of {longest}; raise it, or lower rollout.context_length",
            needed_tokens=longest,
            total_tokens=tokens,
        )


def _check_towers(config: "NodeConfig", models: "Sequence[ModelShape]") -> None:
    """Refuses what vision models and their texts cannot have."""
    trainer = config.trainer
    if trainer.tower_learns and models[0].tower is None:
        field = "trainer.train_tower" if trainer.train_tower else "trainer.lora.tower"
        raise InvalidArgument(field, f"needs a vision tower, which {models[0].architecture} lacks; leave it out")
    if trainer.train_tower and trainer.lora is not None:
        raise InvalidArgument(
            "trainer.train_tower", "trains all of the tower; with [trainer.lora] set trainer.lora.tower instead"
        )
    for model in models:
        if not find_family(model.architecture).text_module:
            continue
        if model.tower is not None and model.tower.num_heads % config.rollout.tp_size:
            problem = f"{model.tower.num_heads} heads of the vision tower cannot be split over {config.rollout.tp_size} ranks"
            raise InvalidArgument("rollout.tp_size", problem)
        if config.served_adapter is not None:
            problem = f'= "adapter" is not for {model.architecture}, whose served adapters are not tested; use "merged"'
            raise InvalidArgument("rollout.lora", problem)
        if "speculative_algorithm" in config.rollout.engine:
            problem = f"is not for {model.architecture}, whose drafts are not tested; leave it out"
            raise InvalidArgument("rollout.engine.speculative_algorithm", problem)


def _check_delta_nets(config: "NodeConfig", models: "Sequence[ModelShape]") -> None:
    """Refuses what gated delta nets cannot have: their state passes through all tokens of a sample, in order."""
    hybrid = next((model for model in models if model.delta is not None), None)
    if hybrid is None or hybrid.delta is None:
        return
    name, trainer, rollout = hybrid.architecture, config.trainer, config.rollout
    if trainer.sequence_parallel > 1:
        problem = (
            f"= {trainer.sequence_parallel} would cut sequences, which the gated delta nets of {name} need whole; leave it out"
        )
        raise InvalidArgument("trainer.sequence_parallel", problem)
    if trainer.prefix_sharing is True:
        problem = f"= true is not for {name}: the state of a gated delta net at a prompt's end is not shared; leave it out"
        raise InvalidArgument("trainer.prefix_sharing", problem)
    if hybrid.delta.num_key_heads % rollout.tp_size or hybrid.delta.num_value_heads % rollout.tp_size:
        problem = f"{hybrid.delta.num_key_heads} key heads of gated delta nets cannot be split over {rollout.tp_size} ranks"
        raise InvalidArgument("rollout.tp_size", problem)
    if config.served_adapter is not None:
        problem = f'= "adapter" is not for {name}, whose gated delta nets the engine serves without adapters; use "merged"'
        raise InvalidArgument("rollout.lora", problem)
    if trainer.compile == "blocks":
        raise InvalidArgument(
            "trainer.compile", f'= "blocks" is not for {name}, whose compiled layers are not tested; leave it out'
        )
    if trainer.router_replay is True:
        raise InvalidArgument("trainer.router_replay", f"= true is not for {name}, whose routes are not tested; leave it out")
    if "speculative_algorithm" in rollout.engine:
        problem = f"is not for {name}, whose states an engine of ours does not keep for drafts; leave it out"
        raise InvalidArgument("rollout.engine.speculative_algorithm", problem)


def check_critic_model(config: "NodeConfig", policy: "ModelShape", critic: "ModelShape") -> None:
    """Raises InvalidArgument for a critic that cannot process every token and sequence of the policy."""
    field = "trainer.critic.path"
    if critic.vocab_size < policy.vocab_size:
        raise InvalidArgument(
            field,
            f"its vocabulary of {critic.vocab_size} tokens is smaller than the policy's of {policy.vocab_size}; give a model with the "
            "policy's tokenizer",
        )
    limits = (policy.context_length, config.rollout.context_length, config.most_micro_batch_tokens)
    longest = min(limit for limit in limits if limit is not None)
    if critic.context_length < longest:
        raise InvalidArgument(
            field,
            f"its context of {critic.context_length} tokens is shorter than the policy's sequences of up to {longest}; lower "
            "rollout.context_length or trainer.micro_batch_tokens, or give another model",
        )


def check_lora_targets(model: "ModelShape", targets: Sequence[str]) -> None:
    """Raises InvalidArgument for a target that is no linear layer of the model, naming those that are."""
    there = list(dict.fromkeys(name for index in range(model.num_layers) for name in model.linear_layers(index)))
    missing = [target for target in targets if target not in there]
    if missing:
        has = f"it has {', '.join(there)}; those of experts are trainer.lora.experts"
        raise InvalidArgument("trainer.lora.target_modules", f"{model.architecture} has no linear {', '.join(missing)}; {has}")


def _check_dropout(config: "NodeConfig") -> None:
    for key, value in (("mlp_tile_tokens", None), ("compile", "none")):
        if getattr(config.trainer, key) != value:
            raise SettingsConflict(f"trainer.{key}", "is not for trainer.lora.dropout; remove one of them")
    if config.train is not None and (loss := config.train.policy_loss()).has_ratio and loss.old_policy is OldPolicy.CURRENT:
        problem = 'must be "given" or "rollout" with trainer.lora.dropout: the current policy drops inputs, the one that sampled did not'
        raise SettingsConflict("train.old_policy", problem)


def _check_lora_layers(lora: "LoraConfig", model: "ModelShape") -> None:
    """Raises InvalidArgument for a name or a pattern without effect."""
    adapted, targeted = lora.layers(model), lora.model_copy(update={"exclude_modules": ()}).layers(model)
    for name in lora.exclude_modules:
        if not any(is_end(name, layer) for layer in targeted):
            problem = f"{name} is no layer of target_modules, nor the end of one such as {next(iter(targeted))}"
            raise InvalidArgument("trainer.lora.exclude_modules", problem)
    if not adapted:
        raise InvalidArgument("trainer.lora.exclude_modules", "leaves no layer with an adapter; name fewer")
    experts = [name for name in model.parameters() if lora.experts and name.endswith(EXPERTS)]
    for key, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for pattern in patterns:
            if any(is_match(pattern, name) for name in experts):
                raise InvalidArgument(f"trainer.lora.{key}", f"{pattern} matches experts, which all have rank and alpha")
            if not any(is_match(pattern, layer) for layer in adapted):
                problem = (
                    f"{pattern} matches no layer with an adapter, such as {next(iter(adapted))}; it must match the end of one"
                )
                raise InvalidArgument(f"trainer.lora.{key}", problem)


def _check_lora_experts(config: "NodeConfig", models: "Sequence[ModelShape]") -> None:
    lora = config.trainer.lora
    if lora is None or not lora.experts:
        return
    for model in models:
        if not model.num_experts or model.has_biased_experts:
            what = "experts with biases, which cannot have adapters" if model.num_experts else "no experts"
            raise InvalidArgument("trainer.lora.experts", f"{model.architecture} has {what}; remove it")
    if config.device == "cuda" and lora.rank % 8:
        problem = f"{lora.rank} is not divisible by 8, as grouped products on a GPU need for trainer.lora.experts"
        raise InvalidArgument("trainer.lora.rank", problem)


def check_gpus(config: "NodeConfig", gpus: "Gpus", *, num_gpus: int) -> None:
    """Raises InvalidArgument for ranks beyond the GPUs of a machine."""
    if num_gpus > MAX_GPUS:
        raise InvalidArgument("gpus", f"must be at most {MAX_GPUS} on one node, not {num_gpus}")
    needed = max(*gpus.trainer, *gpus.rollout) + 1
    if gpus.names and needed > num_gpus:
        raise InvalidArgument("trainer.devices", f"and rollout.devices name {needed} GPUs, not {num_gpus}")
    if config.trainer.num_ranks > num_gpus:
        problem = f"{config.trainer.num_ranks} ranks need as many GPUs; there are {num_gpus}"
        raise InvalidArgument("trainer.num_ranks", problem)
    tp_size, needed = config.rollout.tp_size, config.num_engine_ranks
    if needed > num_gpus:
        key = "rollout.tp_size" if tp_size > num_gpus else "rollout.dp_size"
        raise InvalidArgument(key, f"{config.dp_size} engines of TP {tp_size} need {needed} GPUs, not {num_gpus}")


def port_problem(config: "NodeConfig") -> tuple[str, str] | None:
    """The key to change first and its problem; None if every port authenticates its callers."""
    security, metrics = config.security, config.metrics.listen
    if (security.cert is None) is not (security.key is None):
        given, missing = ("key", "cert") if security.cert is None else ("cert", "key")
        return f"security.{missing}", f"is needed with security.{given}"
    if security.client_ca is not None and security.cert is None:
        return "security.cert", "is needed with security.client_ca"
    knows_callers = security.client_ca is not None or security.callers is not None
    if security.insecure and knows_callers:
        return "security.insecure", "disables authentication; remove it with security.client_ca or security.callers"
    ports = {} if config.listen == UNIX else {"listen": config.listen}
    for key, address in (ports | ({} if metrics is None else {"metrics.listen": metrics})).items():
        if is_beyond_loopback(address) and security.cert is None:
            advice = "set security.cert and security.key (`tasuki certs` makes them), or listen on 127.0.0.1"
            return key, f"= {address} is not loopback: {advice}"
        if is_beyond_loopback(address) and not knows_callers:
            return key, f"= {address} is not loopback: set security.client_ca or security.callers, or listen on 127.0.0.1"
        # Every user of the machine may read metrics on loopback.
        if key == "listen" and not knows_callers and not security.insecure:
            advice = "set security.callers or security.client_ca, or security.insecure = true"
            return key, f"= {address} is open to every user of the machine: {advice}"
    if metrics is not None and any(is_same_port(metrics, taken) for taken in config.port_targets.values()):
        return "metrics.listen", f'= "{metrics}" is already taken by listen = "{config.listen}": choose another port'
    return None


def fleet_port_problem(config: "NodeConfig") -> tuple[str, str] | None:
    """What to set so that a fleet's leader on another machine can call this node; None if it can."""
    fleet = config.fleet
    if fleet is None or fleet.num_nodes == 1 or not is_beyond_loopback(fleet.leader):
        return None
    if config.listen == UNIX or not is_beyond_loopback(config.listen):
        advice = 'set it to HOST:PORT, such as "0.0.0.0:50050", with [security]'
        return "listen", f'= "{config.listen}" cannot be called from node 0, at {fleet.leader}: {advice}'
    return None
