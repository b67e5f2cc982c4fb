"""Converts a node's configuration to the planner's input."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from tasuki.config.engine_arguments import draft_tokens
from tasuki.config.gpus import gpus_of
from tasuki.config.schema import NodeConfig
from tasuki.models.folder_files import bytes_to_copy
from tasuki.models.shape import ModelShape, check_lora_targets, check_shared_base
from tasuki.planner.kv_tokens import SGLANG_GRAPH_REQUESTS, graph_requests, planned_tokens, running_requests, tokens_key
from tasuki.planner.layout import Checkpointing, Layout, Overheads, Part, named_as_given
from tasuki.planner.model_shape import read_model_shape
from tasuki.planner.plan import Plan, largest_pool, plan
from tasuki.planner.residency import decide, given
from tasuki.planner.rollout_bytes import kv_bytes_per_token
from tasuki.planner.step_tokens import most_tokens, with_fastest_checkpointing, with_last_layer_kept
from tasuki.wire.errors import InvalidArgument

_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
_KEYS = {
    "num_ranks": "trainer.num_ranks",
    "sequence_parallel": "trainer.sequence_parallel",
    "expert_parallel": "trainer.expert_parallel",
    "tp_size": "rollout.tp_size",
    "num_engines": "rollout.dp_size",
    "rank_gpus": "trainer.devices",
    "engine_gpus": "rollout.devices",
}
"""Configuration keys for errors that Layout may raise."""


def plan_node(
    config: NodeConfig, *, gpu_bytes: int, host_bytes: int, num_gpus: int | None = None, overheads: Overheads | None = None
) -> Plan:
    """Plans a node's configuration. Raises the errors of read_model_shape and Layout."""
    shape = read_model_shape(config.model.path)
    return plan(node_layout(config, shape, gpu_bytes=gpu_bytes, host_bytes=host_bytes, num_gpus=num_gpus, overheads=overheads))


def check_critic(config: NodeConfig) -> None:
    """Raises InvalidArgument for a critic that cannot process every token or sequence of the policy; else as read_model_shape."""
    if config.trainer.critic is not None and config.trainer.critic.path is not None:
        _critic_shape(config, read_model_shape(config.model.path))


@named_as_given(_KEYS)
def node_layout(
    config: NodeConfig,
    model: ModelShape,
    *,
    gpu_bytes: int,
    host_bytes: int,
    num_gpus: int | None = None,
    overheads: Overheads | None = None,
) -> Layout:
    """num_gpus: by default the number of ranks of the larger service. Open settings are chosen: trainer.micro_batch_tokens on a GPU by
    most_tokens, trainer.checkpointing by with_fastest_checkpointing, and trainer.export_stays so that it stays if everything fits. What
    else stays is configured, or else decided here with the room that a step leaves.

    Raises InvalidArgument naming the configuration's key.
    """
    _check_adapters(config, model)
    num_gpus = max(*gpus_of(config).trainer, *gpus_of(config).rollout) + 1 if num_gpus is None else num_gpus
    layout = _as_configured(config, model, gpu_bytes=gpu_bytes, host_bytes=host_bytes, num_gpus=num_gpus)
    layout = replace(layout, overheads=overheads or Overheads())
    return _with_residency(_with_open_settings(layout, config), config)


def _check_adapters(config: NodeConfig, model: ModelShape) -> None:
    """Raises InvalidArgument for adapters, or a shared base, that the model does not support."""
    trainer = config.trainer
    if trainer.lora is not None:
        check_lora_targets(model, trainer.lora.target_modules)
    if config.shares_base:
        check_shared_base(model, num_ranks=trainer.num_ranks)
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
        export_stays=trainer.export_stays is not False,
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
        shares_base=config.shares_base,
        merges_adapters=config.served_adapter is None,
        kv_ratio=rollout.kv_ratio,
        kv_tokens=planned_tokens(config, context_length=rollout.context_length or model.context_length),
        kv_tokens_key=tokens_key(config),
        budget_bytes=config.memory.host_budget_bytes,
        context_length=rollout.context_length,
        has_cuda_graphs=rollout.engine.get("disable_cuda_graph") is not True,
        graph_requests=graph_requests(config) or SGLANG_GRAPH_REQUESTS,
        max_running_requests=running_requests(config),
        draft_tokens=draft_tokens(rollout.engine),
    )


def _with_open_settings(layout: Layout, config: NodeConfig) -> Layout:
    """Chooses micro-batch tokens, checkpointing and whether the export stays, where the configuration leaves them open."""
    trainer = config.trainer
    # What the engine reads is released first: it is away during a step and costs one copy per changeover.
    chosen = replace(layout, export_stays=False) if trainer.export_stays is None else layout
    if trainer.micro_batch_tokens is None and config.device == "cuda":
        chosen = replace(chosen, micro_batch_tokens=most_tokens(chosen))
    if trainer.checkpointing == "auto":
        chosen = with_fastest_checkpointing(chosen)
    chosen = replace(with_last_layer_kept(chosen), export_stays=layout.export_stays)
    if trainer.export_stays is None and not plan(chosen).fits:
        return replace(chosen, export_stays=False)
    return chosen


def _with_residency(layout: Layout, config: NodeConfig) -> Layout:
    """Parts that stay on each GPU: as configured, or decided with the room that a step leaves."""
    if config.residency is not None:
        return replace(layout, staying=given(layout, config, config.residency))
    check_kv_tokens(layout, config)
    return replace(layout, staying=decide(layout, export_stays=config.trainer.export_stays))


def check_kv_tokens(layout: Layout, config: NodeConfig) -> None:
    """Raises InvalidArgument for a number of tokens that does not fit next to the engine's weights.

    A configured residency is not checked by `node_layout`, since services read it too and may see a GPU as a little smaller.
    """
    key, budget = layout.kv_tokens_key, layout.budget_bytes
    tokens = config.rollout.kv_tokens if key == "rollout.kv_tokens" else layout.kv_tokens
    if not isinstance(tokens, int):
        return
    needed = tokens * kv_bytes_per_token(layout)
    most = largest_pool(layout)
    if tokens <= most.num_tokens:
        return
    if budget is not None and not most.num_tokens:
        text = f"{budget} bytes leave no room for {key} = {tokens}, which take {needed} next to the engine's weights; raise it"
        raise InvalidArgument("memory.host_budget_bytes", text, needed_bytes=needed)
    where, other = f"that kv_ratio = {layout.kv_ratio:g} leaves of a GPU", ["raise rollout.kv_ratio or rollout.tp_size"]
    if layout.device == "cpu":
        where, other = "of this machine", []
        if budget is not None and budget <= layout.host_bytes:
            where, other = f"that memory.host_budget_bytes = {budget} leaves", ["raise memory.host_budget_bytes"]
    fitting = _most_tokens(layout, most.num_tokens)
    options = [*([f"give at most {fitting}"] if fitting else []), *other]
    raise InvalidArgument(
        key,
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
            layout.kv_tokens_key,
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
