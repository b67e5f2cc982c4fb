"""Checks across keys, model and machine."""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from tasuki.algorithms.loss_types import OldPolicy
from tasuki.config.engine_arguments import MAX_TOKENS
from tasuki.config.lora_checks import (
    Problem,
    check_lora_targets,
    check_pissa,
    conflicts_of_lora,
    problems_of_lora_experts,
    problems_of_lora_layers,
)
from tasuki.config.table import MAX_GPUS, UNIX, UUID
from tasuki.models.adapter_folder import check_adapter
from tasuki.models.known import find_family
from tasuki.wire.address import is_beyond_loopback, is_same_port
from tasuki.wire.errors import InvalidArgument

if TYPE_CHECKING:
    from tasuki.config.gpus import Gpus
    from tasuki.config.schema import NodeConfig
    from tasuki.config.trainer_schema import TrainerConfig
    from tasuki.models.shape import ModelShape

UNSERVED_LINEAR = (
    "qkv_proj", "gate_up_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "in_proj_qkv", "in_proj_z", "in_proj_b",
    "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj", "per_layer_input_gate", "per_layer_projection",
)  # fmt: skip
"""Linear layers of a few families, for which SGLang serves no adapters: fused ones, and those of latent attention."""
HEARTBEAT_S = 0.25
"""Interval of a process's heartbeat."""
MISSED_BEATS = 4
"""Missing heartbeats after which a process counts as hung, at least."""
_DRAFTS = "rollout.engine.speculative_algorithm"


class SettingsConflict(ValueError):
    """Two settings that conflict. `field` is the one to change first."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


def check_config(config: "NodeConfig") -> None:
    """Raises SettingsConflict naming both settings."""
    for field, problem in _conflicts(config):
        raise SettingsConflict(field, problem)
    if (found := port_problem(config)) is not None:
        raise SettingsConflict(*found)


def _conflicts(config: "NodeConfig") -> Iterator[Problem]:
    trainer, lora, served = config.trainer, config.trainer.lora, config.served_adapter
    if trainer.param_dtype != "float32" and lora is not None:
        yield "trainer.param_dtype", f'= "{trainer.param_dtype}" is not for [trainer.lora]: adapters are trained in float32'
    yield from _conflicts_of_ranks(config)
    yield from _conflicts_of_devices(config)
    yield from _conflicts_of_kind(config)
    if config.rollout.lora == "adapter" and lora is None:
        yield "rollout.lora", '= "adapter" needs a table [trainer.lora]'
    if lora is not None and lora.dropout:
        for key, value in (("mlp_tile_tokens", None), ("compile", "none")):
            if getattr(trainer, key) != value:
                yield f"trainer.{key}", "is not for trainer.lora.dropout; remove one of them"
        if config.train is not None and (loss := config.train.policy_loss()).has_ratio and loss.old_policy is OldPolicy.CURRENT:
            yield (
                "train.old_policy",
                (
                    'must be "given" or "rollout" with trainer.lora.dropout: the current policy drops inputs, the one that sampled did not'
                ),
            )
    if served is not None:
        for key, what in (("experts", "adapters of experts"), ("use_dora", "DoRA")):
            if getattr(served, key):
                yield "rollout.lora", f'= "adapter" cannot serve {what} (trainer.lora.{key}); leave it at "merged"'
        if unserved := [name for name in UNSERVED_LINEAR if name in served.targets]:
            yield "rollout.lora", f'= "adapter" cannot serve adapters of {", ".join(unserved)}; leave it at "merged"'
    if lora is not None and lora.path is not None and config.has_kl:
        problem = (
            "starts the policy, but the KL reference would be the model without it; merge it into the model with PEFT, or "
        )
        yield "trainer.lora.path", f"{problem}set kl_coef = 0"
    yield from conflicts_of_lora(config)
    yield from _conflicts_of_megatron(config)
    yield from _conflicts_of_runs(config)


def _conflicts_of_megatron(config: "NodeConfig") -> Iterator[Problem]:
    """What only the FSDP backend has, with the way round."""
    trainer = config.trainer
    if trainer.backend == "fsdp":
        if trainer.megatron is not None:
            yield "trainer.megatron", 'is set, but trainer.backend is "fsdp"; set that to "megatron", or remove the table'
        return
    for key, size in () if trainer.megatron is None else trainer.megatron:
        if trainer.num_ranks % size:
            yield f"trainer.megatron.{key}", f"= {size} does not divide trainer.num_ranks = {trainer.num_ranks}"
    instead = {
        "sequence_parallel": (1, "set trainer.megatron.tensor_parallel, which splits samples too"),
        "expert_parallel": (False, "set trainer.megatron.expert_parallel"),
        "critic": (None, "use an estimator without one"),
        "mlp_tile_tokens": (None, "raise trainer.megatron.tensor_parallel"),
        "compile": ("none", "remove it"),
        "train_tower": (False, "remove it"),
        "router_bias_update_rate": (0.0, "remove it"),
        "reference_on_host": (None, "raise trainer.num_ranks or trainer.megatron.tensor_parallel"),
    }
    for key, (lacking, advice) in instead.items():
        if getattr(trainer, key) != lacking:
            yield f"trainer.{key}", f'is not for trainer.backend = "megatron": {advice}, or use "fsdp"'
    if trainer.optimizer_8bit:
        yield "trainer.moments", '= "8bit" is not for trainer.backend = "megatron": set "host", or use "fsdp"'
    if trainer.checkpointing == "offloaded":
        yield "trainer.checkpointing", '= "offloaded" is not for trainer.backend = "megatron": set "full", or use "fsdp"'


def _conflicts_of_runs(config: "NodeConfig") -> Iterator[Problem]:
    """Runs without what they train, and output folders in the model's, whose files an export copies, or in place of the data."""
    critic, train, sft = config.trainer.critic, config.train, config.sft
    is_given = train is None or train.policy_loss().old_policy is OldPolicy.GIVEN
    if config.trainer.router_replay == "old_policy" and (sft is not None or not is_given):
        yield "trainer.router_replay", '= "old_policy" needs train.old_policy = "given", whose pass chooses the experts'
    uses_critic = train is not None and train.advantages.estimator == "gae"
    if uses_critic and critic is None:
        yield "train.advantages.estimator", '= "gae" needs a critic: add a table [trainer.critic]'
    if critic is not None and train is not None and not uses_critic:
        yield "trainer.critic", 'is set, but nothing trains it; set train.algorithm = "ppo", or remove it'
    if sft is not None and train is not None:
        yield "sft", "is in one file with [train]; put them into two files"
    if critic is not None and sft is not None:
        yield "trainer.critic", "is set, but [sft] trains only the policy; remove it"
    for table, run in (("train", train), ("sft", sft)):
        if run is None:
            continue
        given = {"model.path": config.model.path, f"{table}.dataset": run.dataset, f"{table}.eval_dataset": run.eval_dataset}
        for key, path in given.items():
            if path is None or not path.is_absolute():  # an id of the hub
                continue
            if Path(os.path.realpath(run.output_dir)).is_relative_to(os.path.realpath(path)):
                yield f"{table}.output_dir", f"is in {key}, {path}; choose a folder of its own for the run"


def _conflicts_of_ranks(config: "NodeConfig") -> Iterator[Problem]:
    trainer, num_ranks = config.trainer, config.trainer.num_ranks
    given = {
        "trainer.num_ranks": num_ranks,
        "rollout.tp_size": config.rollout.tp_size,
        "rollout.dp_size": config.num_engine_ranks,
    }
    for field, number in given.items():
        if number > MAX_GPUS:
            yield field, f"makes {number} ranks; one node has at most {MAX_GPUS}"
    if num_ranks % trainer.sequence_parallel:
        yield "trainer.sequence_parallel", f"= {trainer.sequence_parallel} does not divide trainer.num_ranks = {num_ranks}"
    if trainer.expert_parallel and num_ranks == 1:
        yield "trainer.expert_parallel", "= true needs trainer.num_ranks above 1: one rank has all experts"
    if trainer.expert_parallel and trainer.mlp_tile_tokens is not None:
        problem = f"= {trainer.mlp_tile_tokens} is not for trainer.expert_parallel = true, whose ranks would exchange unequal "
        yield "trainer.mlp_tile_tokens", f"{problem}numbers of tiles; remove one of them"


def _conflicts_of_devices(config: "NodeConfig") -> Iterator[Problem]:
    """GPUs must be named for all ranks of both services or for none."""
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
        yield f"{next(iter(given))}.devices", f"needs {', and '.join(needs)}"
    for service, (devices, num_ranks) in named.items():
        if devices is not None and len(devices) != num_ranks:
            yield f"{service}.devices", f"names {len(devices)} GPUs for {num_ranks} ranks"
    names = sorted({name for devices in given.values() for name in devices})
    if len({name.startswith(UUID) for name in names}) > 1:
        yield "trainer.devices", "and rollout.devices are UUIDs or numbers, not both"
    for name, longer in pairwise(names):
        if name.startswith(UUID) and longer.startswith(name):  # CUDA accepts a prefix of a UUID
            yield "trainer.devices", f"and rollout.devices name one GPU in two ways, {name} and {longer}"


def _conflicts_of_kind(config: "NodeConfig") -> Iterator[Problem]:
    trainer, is_gpu, drafts = config.trainer, config.device == "cuda", "speculative_algorithm" in config.rollout.engine
    if not is_gpu and trainer.attention_backend in ("fa4", "varlen"):
        yield "trainer.attention_backend", f'= "{trainer.attention_backend}" needs device = "cuda": leave it out'
    if trainer.router_replay is True and drafts:
        yield "trainer.router_replay", f"= true is not for {_DRAFTS}: SGLang's drafts overflow its routes; remove one of them"
    if not is_gpu and drafts:
        yield _DRAFTS, 'needs device = "cuda": SGLang does not speculate on a CPU; leave it out'
    if is_gpu and config.rollout.dtype == "float32":
        problem = '= "float32" is not possible with device = "cuda", where SGLang\'s kernels take bfloat16: leave it out'
        yield "rollout.dtype", problem
    if is_gpu and config.memory.host_budget_bytes is not None:
        yield "memory.host_budget_bytes", 'is for device = "cpu"; the memory of a GPU is measured'


def replays_routes(config: "NodeConfig", model: "ModelShape") -> bool:
    """Whether the policy replays the experts of rollout. "auto" does for a mixture in RL, if reporting them is not slow."""
    replay, drafts = config.trainer.router_replay, "speculative_algorithm" in config.rollout.engine
    if replay == "auto":
        is_slower = config.device == "cuda" and model.architecture == "GptOssForCausalLM"
        replay = config.sft is None and not drafts and not is_slower
    return replay is True and model.num_experts > 0


def check_model(config: "NodeConfig", model: "ModelShape", *, critic: "ModelShape | None" = None) -> None:
    """Raises InvalidArgument for settings that these models cannot have."""
    trainer, rollout = config.trainer, config.rollout
    models = [model] if critic is None else [model, critic]
    if critic is not None:
        check_critic_model(config, model, critic)
    if trainer.lora is not None:
        check_lora_targets(model, trainer.lora.targets)
        is_whole = trainer.lora.is_fused or (trainer.lora.use_dora and trainer.backend == "megatron")
        problems = problems_of_lora_layers(trainer.lora, model, is_whole=is_whole)
        _raise_first(chain(problems, problems_of_lora_experts(config, models)))
        check_pissa(model, trainer.lora, key="trainer.lora.rank")
        if trainer.lora.path is not None:
            check_adapter(trainer.lora.path, model, trainer.lora)
    if critic is not None and trainer.critic_lora is not None:
        check_lora_targets(critic, trainer.critic_lora.targets)
        check_pissa(critic, trainer.critic_lora, key="trainer.critic.lora_rank")
    _raise_first(_problems_of_models(config, models))
    tokens, longest = rollout.engine.get(MAX_TOKENS), rollout.context_length or model.context_length
    if longest > model.context_length:
        raise InvalidArgument("rollout.context_length", f"{longest} is more than the model's {model.context_length} positions")
    if isinstance(tokens, int) and tokens < longest:
        problem = f"= {tokens} cannot hold one sequence of {longest}; raise it, or lower rollout.context_length"
        raise InvalidArgument(f"rollout.engine.{MAX_TOKENS}", problem, needed_tokens=longest, total_tokens=tokens)


def _raise_first(problems: Iterable[Problem]) -> None:
    for field, problem in problems:
        raise InvalidArgument(field, problem)


def _problems_of_models(config: "NodeConfig", models: "Sequence[ModelShape]") -> Iterator[Problem]:
    """models: the policy, and the critic if there is one."""
    trainer, tp_size, shared = config.trainer, config.rollout.tp_size, config.trainer.sequence_parallel
    model, name = models[0], models[0].architecture
    if config.served_adapter is not None and model.latent is not None:
        yield "rollout.lora", f'= "adapter" is not for latent attention, which {name} has; leave it at "merged"'
    if model.num_heads % tp_size:
        yield "rollout.tp_size", f"{model.num_heads} attention heads cannot be split over {tp_size} ranks"
    for each in models:
        yield from _problems_of_delta_nets(config, each)
    if trainer.backend == "megatron":
        yield from _problems_of_megatron(model, trainer)
    if trainer.tower_learns and model.tower is None:
        field = "trainer.train_tower" if trainer.train_tower else "trainer.lora.tower"
        yield field, f"needs a vision tower, which {name} lacks; leave it out"
    if trainer.train_tower and trainer.lora is not None:
        yield "trainer.train_tower", "trains all of the tower; with [trainer.lora] set trainer.lora.tower instead"
    for each in models:
        yield from _problems_of_vision(config, each)
    if trainer.compile == "blocks" and any(not each.at(each.num_layers - 1).has_own_keys for each in models):
        yield (
            "trainer.compile",
            f'= "blocks" is not for {name}, whose layers share keys, which compiled ones do not; leave it out',
        )
    for each in models:
        if each.num_heads % shared:
            yield "trainer.sequence_parallel", f"{shared} ranks cannot share {each.num_heads} attention heads evenly"
        for heads in {layer.num_kv_heads for layer in each.layer_sizes or (each,)}:
            if heads % shared and shared % heads:
                problem = f"{shared} ranks can neither share {heads} key heads evenly, nor have one of them each"
                yield "trainer.sequence_parallel", problem
    if trainer.router_aux_loss_coef and not model.num_experts:
        yield "trainer.router_aux_loss_coef", f"{name} has no experts to balance; remove it"
    if trainer.router_bias_update_rate and (not model.has_router_bias or trainer.lora is not None):
        what = "adapters train no router" if model.has_router_bias else f"{name} has no router with a bias"
        yield "trainer.router_bias_update_rate", f"{what}; remove it"
    sparse = [one for one in models if one.num_experts]
    if trainer.expert_parallel and not sparse:
        yield "trainer.expert_parallel", f"{name} has no experts to spread; remove it"
    for one in sparse if trainer.expert_parallel else ():
        if one.num_experts % trainer.num_ranks:
            problem = f"{trainer.num_ranks} ranks cannot share {one.num_experts} experts of {one.architecture} evenly"
            yield "trainer.expert_parallel", f"{problem}; give a number of ranks that divides them, or remove it"


MEGATRON_FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


def _problems_of_megatron(model: "ModelShape", trainer: "TrainerConfig") -> Iterator[Problem]:
    """What megatron-core's layers cannot have, or are not tested with."""
    name, tensor_parallel, expert_ranks = model.architecture, trainer.tensor_parallel, trainer.expert_ranks
    if name not in MEGATRON_FAMILIES or model.has_output_bias:
        what = f"{name} with biases of all projections" if model.has_output_bias else name
        yield "trainer.backend", f'= "megatron" does not train {what}: use "fsdp"; it has {", ".join(MEGATRON_FAMILIES)}'
    sizes = {
        "attention heads": model.num_heads,
        "key heads": model.num_kv_heads,
        "numbers inside an MLP": 0 if model.num_experts else model.intermediate_size,
        "tokens of the vocabulary": model.vocab_size,
    }
    for what, size in sizes.items():
        if size % tensor_parallel:
            problem = f"{tensor_parallel} ranks cannot share {size} {what} of {name} evenly; give a divisor of all of these"
            yield "trainer.megatron.tensor_parallel", problem
    if expert_ranks > 1 and not model.num_experts:
        yield "trainer.megatron.expert_parallel", f"{name} has no experts to spread; remove it"
    elif model.num_experts % expert_ranks:
        problem = f"{expert_ranks} ranks cannot share {model.num_experts} experts of {name} evenly; give a divisor"
        yield "trainer.megatron.expert_parallel", problem


def _problems_of_vision(config: "NodeConfig", model: "ModelShape") -> Iterator[Problem]:
    """What vision models and their texts cannot have."""
    if not find_family(model.architecture).text_module:
        return
    if model.tower is not None and model.tower.num_heads % config.rollout.tp_size:
        problem = f"{model.tower.num_heads} heads of the vision tower cannot be split over {config.rollout.tp_size} ranks"
        yield "rollout.tp_size", problem
    if config.served_adapter is not None:
        problem = f'= "adapter" is not for {model.architecture}, whose served adapters are not tested; use "merged"'
        yield "rollout.lora", problem
    if "speculative_algorithm" in config.rollout.engine:
        yield _DRAFTS, f"is not for {model.architecture}, whose drafts are not tested; leave it out"


def _problems_of_delta_nets(config: "NodeConfig", model: "ModelShape") -> Iterator[Problem]:
    """What gated delta nets cannot have: their state passes through all tokens of a sample, in order."""
    if model.delta is None:
        return
    name, trainer, rollout = model.architecture, config.trainer, config.rollout
    if trainer.sequence_parallel > 1:
        problem = f"= {trainer.sequence_parallel} would cut sequences, which the gated delta nets of {name} need whole"
        yield "trainer.sequence_parallel", f"{problem}; leave it out"
    if trainer.prefix_sharing is True:
        problem = f"= true is not for {name}: the state of a gated delta net at a prompt's end is not shared; leave it out"
        yield "trainer.prefix_sharing", problem
    if model.delta.num_key_heads % rollout.tp_size or model.delta.num_value_heads % rollout.tp_size:
        problem = f"{model.delta.num_key_heads} key heads of gated delta nets cannot be split over {rollout.tp_size} ranks"
        yield "rollout.tp_size", problem
    if config.served_adapter is not None:
        problem = f'= "adapter" is not for {name}, whose gated delta nets the engine serves without adapters; use "merged"'
        yield "rollout.lora", problem
    if trainer.compile == "blocks":
        yield "trainer.compile", f'= "blocks" is not for {name}, whose compiled layers are not tested; leave it out'
    if "speculative_algorithm" in rollout.engine:
        yield _DRAFTS, f"is not for {name}, whose states an engine of ours does not keep for drafts; leave it out"


def check_critic_model(config: "NodeConfig", policy: "ModelShape", critic: "ModelShape") -> None:
    """Raises InvalidArgument for a critic that cannot process every token and sequence of the policy."""
    if critic.vocab_size < policy.vocab_size:
        problem = f"its vocabulary of {critic.vocab_size} tokens is smaller than the policy's of {policy.vocab_size}"
        raise InvalidArgument("trainer.critic.path", f"{problem}; give a model with the policy's tokenizer")
    limits = (policy.context_length, config.rollout.context_length, config.most_micro_batch_tokens)
    longest = min(limit for limit in limits if limit is not None)
    if critic.context_length < longest:
        problem = f"its context of {critic.context_length} tokens is shorter than the policy's sequences of up to {longest}"
        advice = "lower rollout.context_length or trainer.micro_batch_tokens, or give another model"
        raise InvalidArgument("trainer.critic.path", f"{problem}; {advice}")


def check_gpus(config: "NodeConfig", gpus: "Gpus", *, num_gpus: int) -> None:
    """Raises InvalidArgument for ranks beyond the GPUs of a machine."""
    _raise_first(_problems_of_gpus(config, gpus, num_gpus))


def _problems_of_gpus(config: "NodeConfig", gpus: "Gpus", num_gpus: int) -> Iterator[Problem]:
    if num_gpus > MAX_GPUS:
        yield "gpus", f"must be at most {MAX_GPUS} on one node, not {num_gpus}"
    if gpus.names and (needed := max(*gpus.trainer, *gpus.rollout) + 1) > num_gpus:
        yield "trainer.devices", f"and rollout.devices name {needed} GPUs, not {num_gpus}"
    if config.trainer.num_ranks > num_gpus:
        yield "trainer.num_ranks", f"{config.trainer.num_ranks} ranks need as many GPUs; there are {num_gpus}"
    tp_size, needed = config.rollout.tp_size, config.num_engine_ranks
    if needed > num_gpus:
        key = "rollout.tp_size" if tp_size > num_gpus else "rollout.dp_size"
        yield key, f"{config.dp_size} engines of TP {tp_size} need {needed} GPUs, not {num_gpus}"


def port_problem(config: "NodeConfig") -> Problem | None:
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


def fleet_port_problem(config: "NodeConfig") -> Problem | None:
    """What to set so that a fleet's leader on another machine can call this node; None if it can."""
    fleet = config.fleet
    if fleet is None or fleet.num_nodes == 1 or not is_beyond_loopback(fleet.leader):
        return None
    if config.listen == UNIX or not is_beyond_loopback(config.listen):
        advice = 'set it to HOST:PORT, such as "0.0.0.0:50050", with [security]'
        return "listen", f'= "{config.listen}" cannot be called from node 0, at {fleet.leader}: {advice}'
    return None
