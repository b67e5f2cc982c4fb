"""Converts a node's configuration to the planner's input."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from tasuki.config.choices import Choices
from tasuki.config.engine_arguments import MAX_TOKENS, draft_tokens
from tasuki.config.gpus import gpus_of
from tasuki.config.schema import NodeConfig
from tasuki.models.folder_files import bytes_to_copy
from tasuki.models.shape import ModelShape, check_lora_targets, unshared_base
from tasuki.planner.kv_tokens import SGLANG_GRAPH_REQUESTS, TOKENS_KEY, graph_requests, running_requests, wanted_tokens
from tasuki.planner.layout import Checkpointing, Layout, Overheads, Part
from tasuki.planner.model_shape import read_model_shape
from tasuki.planner.plan import Plan, largest_pool, plan
from tasuki.planner.residency import decide, given, starts_together, stay_and_leave, staying_names
from tasuki.planner.rollout_bytes import kv_bytes_per_token
from tasuki.planner.step_tokens import most_tokens, with_fastest_checkpointing, with_last_layer_kept
from tasuki.wire.errors import InvalidArgument

_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}


def plan_node(config: NodeConfig, *, gpu_bytes: int, host_bytes: int, choices: Choices | None = None) -> Plan:
    """Plans a node's configuration, with the choices of its start if it has started. Raises as read_model_shape and node_layout."""
    if choices is not None:
        return plan(layout_of(config, choices, gpu_bytes=gpu_bytes, host_bytes=host_bytes))
    return plan(node_layout(config, read_model_shape(config.model.path), gpu_bytes=gpu_bytes, host_bytes=host_bytes))


def check_critic(config: NodeConfig) -> None:
    """Raises InvalidArgument for a critic that cannot process every token or sequence of the policy; else as read_model_shape."""
    if config.trainer.critic is not None and config.trainer.critic.path is not None:
        _critic_shape(config, read_model_shape(config.model.path))


def node_layout(
    config: NodeConfig,
    model: ModelShape,
    *,
    gpu_bytes: int,
    host_bytes: int,
    num_gpus: int | None = None,
    overheads: Overheads | None = None,
    free_host_bytes: int | None = None,
) -> Layout:
    """Layout with everything that the configuration leaves open chosen.

    num_gpus: by default the number of ranks of the larger service. free_host_bytes: for what stays; by default `host_bytes`. Tokens of a
    micro-batch are those of most_tokens, checkpointing is that of with_fastest_checkpointing, and as much stays as has room. A base is
    shared where a second copy would cost something.

    Raises InvalidArgument naming the configuration's key.
    """
    _check_adapters(config, model)
    num_gpus = max(*gpus_of(config).trainer, *gpus_of(config).rollout) + 1 if num_gpus is None else num_gpus
    layout = _as_configured(config, model, gpu_bytes=gpu_bytes, host_bytes=host_bytes, num_gpus=num_gpus)
    layout = replace(layout, overheads=overheads or Overheads())
    free_host_bytes = host_bytes if free_host_bytes is None else free_host_bytes
    chosen = _with_choices_made(layout, config, free_host_bytes=free_host_bytes)
    if not may_share_base(config, model) or (plan(chosen).fits and not any(leaves for _, _, leaves in stay_and_leave(chosen))):
        return chosen
    return _with_choices_made(replace(layout, shares_base=True), config, free_host_bytes=free_host_bytes)


def may_share_base(config: NodeConfig, model: ModelShape) -> bool:
    """Whether trainer and engine can read one copy of the model below the adapters: each trainer rank reads one engine rank's slices.

    Not chosen on a CPU, where SGLang may pad and pack weights.
    """
    trainer, rollout = config.trainer, config.rollout
    return (
        config.device == "cuda"
        and config.served_adapter is not None
        and (rollout.tp_size, config.dp_size, rollout.devices) == (trainer.num_ranks, 1, trainer.devices)
        and trainer.compute_dtype == rollout.dtype
        and unshared_base(model, num_ranks=trainer.num_ranks) is None
    )


def layout_of(config: NodeConfig, choices: Choices, *, gpu_bytes: int = 1, host_bytes: int = 1) -> Layout:
    """Layout of a node that has started. The sizes matter only to what is planned beside its own tensors. Raises as read_model_shape."""
    model, gpus = read_model_shape(config.model.path), gpus_of(config)
    num_gpus = max(*gpus.trainer, *gpus.rollout) + 1
    layout = _as_configured(config, model, gpu_bytes=gpu_bytes, host_bytes=host_bytes, num_gpus=num_gpus)
    layout = replace(
        layout,
        micro_batch_tokens=choices.micro_batch_tokens,
        checkpointing=Checkpointing(choices.checkpointing),
        kept_layers=choices.kept_layers,
        shares_base=choices.shares_base,
        kv_tokens=choices.kv_tokens,
    )
    return replace(layout, staying=given(layout, config, choices))


def choices_of(layout: Layout, config: NodeConfig, *, resumes: bool = False) -> Choices:
    """The layout's choices for a node's services. resumes: the trainer replays steps at its start, which needs the memory of a step."""
    is_counted = config.device == "cpu" or layout.kv_tokens is not None
    trainer, rollout = staying_names(layout, config)
    return Choices(
        micro_batch_tokens=layout.micro_batch_tokens,
        checkpointing=layout.checkpointing.value,
        kept_layers=layout.kept_layers,
        shares_base=layout.shares_base,
        trainer=trainer,
        rollout=rollout,
        kv_tokens=plan(layout).kv_pool.num_tokens or None if is_counted else None,
        starts_together=starts_together(layout) and not (resumes and config.device == "cuda"),
    )


def _check_adapters(config: NodeConfig, model: ModelShape) -> None:
    """Raises InvalidArgument for adapters that the model does not support."""
    trainer = config.trainer
    if trainer.lora is not None:
        check_lora_targets(model, trainer.lora.target_modules)
    if trainer.critic_lora is not None:
        check_lora_targets(model, trainer.critic_lora.target_modules)


def _as_configured(config: NodeConfig, model: ModelShape, *, gpu_bytes: int, host_bytes: int, num_gpus: int) -> Layout:
    """Layout with the settings that the configuration leaves open at the values from which the search for them starts."""
    trainer, rollout, gpus = config.trainer, config.rollout, gpus_of(config)
    critic_lora = trainer.critic_lora
    return Layout(
        model=model,
        num_gpus=num_gpus,
        rank_gpus=gpus.trainer if gpus.names else None,
        engine_gpus=gpus.rollout if gpus.names else None,
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes,
        device=config.device,
        num_ranks=trainer.num_ranks,
        sequence_parallel=trainer.sequence_parallel,
        expert_parallel=trainer.expert_parallel,
        tp_size=rollout.tp_size,
        num_engines=config.dp_size,
        compute_bytes=_ELEMENT_BYTES[trainer.compute_dtype],
        engine_bytes=_ELEMENT_BYTES[rollout.dtype],
        param_bytes=_ELEMENT_BYTES[trainer.param_dtype],
        exports_parameters=config.exports_parameters,
        micro_batch_tokens=config.most_micro_batch_tokens,
        # If residency is open, tokens are chosen first: none of it costs as much as a step of more and smaller micro-batches.
        checkpointing=Checkpointing.OFFLOADED if trainer.checkpointing == "auto" else Checkpointing(trainer.checkpointing),
        shares_prompts=config.may_share_prompts,
        mlp_tile_tokens=trainer.mlp_tile_tokens,
        is_compiled=trainer.compile == "blocks",
        optimizer_on_host=trainer.optimizer_on_host,
        optimizer_8bit=trainer.optimizer_8bit,
        has_reference=config.has_reference,
        preloaded_bytes=bytes_to_copy(config.model.path, host_bytes=host_bytes),
        reference_on_host=config.has_reference and config.reference_is_on_host,
        lora_rank=None if trainer.lora is None else trainer.lora.rank,
        lora_targets=None if trainer.lora is None else trainer.lora.target_modules,
        critic=_critic_shape(config, model),
        critic_lora_rank=None if critic_lora is None else critic_lora.rank,
        critic_lora_targets=None if critic_lora is None else critic_lora.target_modules,
        merges_adapters=config.served_adapter is None,
        kv_ratio=rollout.kv_ratio,
        kv_tokens=wanted_tokens(config, context_length=rollout.context_length or model.context_length),
        budget_bytes=config.memory.host_budget_bytes,
        context_length=rollout.context_length,
        has_cuda_graphs=rollout.engine.get("disable_cuda_graph") is not True,
        graph_requests=graph_requests(config) or SGLANG_GRAPH_REQUESTS,
        max_running_requests=running_requests(config),
        draft_tokens=draft_tokens(rollout.engine),
    )


def _with_choices_made(layout: Layout, config: NodeConfig, *, free_host_bytes: int) -> Layout:
    chosen = _with_open_settings(layout, config)
    _check_tokens(chosen, config)
    decided = decide(replace(chosen, host_bytes=free_host_bytes))
    return replace(chosen, staying=decided)


def _with_open_settings(layout: Layout, config: NodeConfig) -> Layout:
    """Chooses micro-batch tokens, checkpointing and whether the export stays."""
    trainer = config.trainer
    # What the engine reads is released first: it is away during a step and costs one copy per changeover.
    chosen = replace(layout, export_stays=False)
    if trainer.micro_batch_tokens is None and config.device == "cuda":
        chosen = replace(chosen, micro_batch_tokens=most_tokens(chosen))
    if trainer.checkpointing == "auto":
        chosen = with_fastest_checkpointing(chosen)
    chosen = with_last_layer_kept(chosen)
    stays = replace(chosen, export_stays=True)
    return stays if plan(stays).fits else chosen


def _check_tokens(layout: Layout, config: NodeConfig) -> None:
    """Raises InvalidArgument for a given number of tokens that does not fit next to the engine's weights."""
    budget, tokens = layout.budget_bytes, config.rollout.engine.get(MAX_TOKENS)
    if not isinstance(tokens, int):
        return
    needed = tokens * kv_bytes_per_token(layout)
    most = largest_pool(layout)
    if tokens <= most.num_tokens:
        return
    if budget is not None and not most.num_tokens:
        text = f"{budget} bytes leave no room for {TOKENS_KEY} = {tokens}, which take {needed} next to the engine's weights; raise it"
        raise InvalidArgument("memory.host_budget_bytes", text, needed_bytes=needed)
    where, other = f"that kv_ratio = {layout.kv_ratio:g} leaves of a GPU", ["raise rollout.kv_ratio or rollout.tp_size"]
    if layout.device == "cpu":
        where, other = "of this machine", []
        if budget is not None and budget <= layout.host_bytes:
            where, other = f"that memory.host_budget_bytes = {budget} leaves", ["raise memory.host_budget_bytes"]
    fitting = _most_tokens(layout, most.num_tokens)
    options = [*([f"give at most {fitting}"] if fitting else []), *other]
    raise InvalidArgument(
        TOKENS_KEY,
        f"{tokens} tokens take {needed} bytes, more than the {most.num_bytes} {where}; "
        f"{', '.join(options)}{', or ' if options else ''}remove it",
        needed_bytes=needed,
        free_bytes=most.num_bytes,
    )


def _most_tokens(layout: Layout, limit: int) -> int:
    """The largest number up to `limit` with which the rest of the node fits too, if nothing stays; 0 if none does."""
    if layout.device == "cuda":
        return limit
    bare = replace(layout, staying=(frozenset[Part](),) * layout.num_gpus)
    numbers = range(layout.longest_sequence, limit + 1)
    num_fitting = bisect_left(numbers, True, key=lambda tokens: not _fits(plan(replace(bare, kv_tokens=tokens))))
    return numbers[num_fitting - 1] if num_fitting else 0


def _fits(planned: Plan) -> bool:
    """Whether a node on a CPU fits into its budget, or else into the machine."""
    return planned.fits_budget and (planned.layout.budget_bytes is not None or planned.fits_host)


def check_sequence(layout: Layout) -> None:
    """Raises InvalidArgument for a number of tokens that cannot hold one sequence, without which rollout does not start."""
    if layout.kv_tokens is not None and layout.kv_tokens < layout.longest_sequence:
        raise InvalidArgument(
            TOKENS_KEY,
            f"= {layout.kv_tokens} cannot hold one sequence of {layout.longest_sequence}; raise it, or lower rollout.context_length",
            needed_tokens=layout.longest_sequence,
            total_tokens=layout.kv_tokens,
        )


def _critic_shape(config: NodeConfig, policy: ModelShape) -> ModelShape | None:
    critic = config.trainer.critic
    if critic is None:
        return None
    if critic.path is None:
        return policy
    shape = read_model_shape(critic.path)
    _check_critic(config, policy, shape)
    return shape


def _check_critic(config: NodeConfig, policy: ModelShape, critic: ModelShape) -> None:
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
