"""Chooses what a node's configuration leaves open: tokens, checkpointing, a shared base, and what stays."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace

from tasuki.config.choices import Choices
from tasuki.config.engine_arguments import MAX_TOKENS
from tasuki.config.schema import NodeConfig
from tasuki.models.shape import ModelShape, unshared_base
from tasuki.planner.kv_tokens import TOKENS_KEY
from tasuki.planner.node import MARGIN, Checkpointing, Node, Part, Strategy, node_of
from tasuki.planner.plan import Plan, largest_pool, parts_on_gpu, plan, sizes_of
from tasuki.planner.residency import chosen_staying, decide, stay_and_leave, staying_names
from tasuki.planner.rollout_bytes import MEASURED_FREE, kv_bytes_per_token
from tasuki.planner.step_bytes import TRIAL_TOKENS, training_peak
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.stages import Phase

MIN_TOKENS = 1024
"""Fewest tokens of a micro-batch that are chosen."""
_SURE = 0.95


def plan_node(config: NodeConfig, *, gpu_bytes: int, host_bytes: int, choices: Choices | None = None) -> Plan:
    """Plans a configuration, with the choices of the node's start if it has started. Raises as node_of and choose."""
    node = node_of(config, gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    return plan(choose(node) if choices is None else chosen(node, choices))


def choose(node: Node, *, free_host_bytes: int | None = None) -> Node:
    """The node with every open choice made. A base is shared where a second copy would cost something, and merged in place where no copy
    fits.

    free_host_bytes: for what stays; by default `host_bytes`. Raises InvalidArgument for a given number of tokens that do not fit into
    the KV cache.
    """
    made = _choose(node, free_host_bytes)
    fits = plan(made).fits
    if may_share_base(node.config, node.model) and not (fits and not any(leaves for _, _, leaves in stay_and_leave(made))):
        return _choose(replace(node, shares_base=True), free_host_bytes)
    if may_merge_in_place(node) and not fits:
        in_place = _choose(replace(node, merges_in_place=True), free_host_bytes)
        return min(made, in_place, key=lambda tried: (not plan(tried).fits, _lacking_bytes(tried)))
    return made


def _choose(node: Node, free_host_bytes: int | None) -> Node:
    # Tokens are chosen with nothing staying: none of it costs as much as a step of more and smaller micro-batches.
    if node.trainer.micro_batch_tokens is None and node.device == "cuda":
        node = replace(node, micro_batch_tokens=most_tokens(node))
    if node.trainer.checkpointing == "auto":
        node = with_fastest_checkpointing(node)
    node = with_last_layer_kept(node)
    published = node.keeping(node.published)
    start = published if plan(published).fits and not node.merges_in_place else node
    _check_tokens(start)
    free_host_bytes = node.host_bytes if free_host_bytes is None else free_host_bytes
    return replace(node, staying=decide(replace(start, host_bytes=free_host_bytes)))


def may_fit(node: Node, *, at_any_ratio: bool) -> bool:
    """Whether some choice may fit on the GPUs; False is certain. at_any_ratio: with a KV cache of one sequence, whatever `kv_ratio` is."""
    if node.device == "cpu":
        return True
    if node.trainer.micro_batch_tokens is None:
        node = replace(node, micro_batch_tokens=_token_ladder(node)[-1])
    if at_any_ratio:
        node = replace(node, kv_tokens=min(node.longest_sequence, node.kv_tokens or node.longest_sequence))
    rungs = _rungs(node) if node.trainer.checkpointing == "auto" else (node.checkpointing,)
    ways = [node, *([replace(node, shares_base=True)] if may_share_base(node.config, node.model) else [])]
    ways += [replace(node, merges_in_place=True)] if may_merge_in_place(node) else []
    return any(plan(replace(way, checkpointing=rung)).fits_gpu for rung in reversed(list(rungs)) for way in reversed(ways))


def chosen(node: Node, choices: Choices) -> Node:
    """The node with the choices of its start."""
    node = replace(
        node,
        micro_batch_tokens=choices.micro_batch_tokens,
        checkpointing=Checkpointing(choices.checkpointing),
        kept_layers=choices.kept_layers,
        shares_base=choices.shares_base,
        merges_in_place=choices.merges_in_place,
        kv_tokens=choices.kv_tokens,
    )
    return replace(node, staying=chosen_staying(node, choices))


def choices_of(node: Node, *, resumes: bool = False) -> Choices:
    """The node's choices for its services. resumes: the trainer replays steps at its start, which needs the memory of a step."""
    is_counted = node.device == "cpu" or node.kv_tokens is not None
    return Choices(
        micro_batch_tokens=node.micro_batch_tokens,
        checkpointing=node.checkpointing.value,
        kept_layers=node.kept_layers,
        shares_base=node.shares_base,
        merges_in_place=node.merges_in_place,
        kv_tokens=sizes_of(node).kv_pool.num_tokens or None if is_counted else None,
        starts_together=starts_together(node) and not (resumes and node.device == "cuda"),
        later_bytes=plan(node).later_bytes,
        **staying_names(node),
    )


def may_share_base(config: NodeConfig, model: ModelShape) -> bool:
    """Whether trainer and engine can read one copy of the model below the adapters: each trainer rank reads one engine rank's slices.

    Not chosen on a CPU, where SGLang may pad and pack weights.
    """
    trainer, rollout = config.trainer, config.rollout
    return (
        config.device == "cuda"
        and trainer.backend == "fsdp"
        and config.served_adapter is not None
        and (rollout.tp_size, config.dp_size, rollout.devices) == (trainer.num_ranks, 1, trainer.devices)
        and trainer.compute_dtype == rollout.dtype
        and unshared_base(model, num_ranks=trainer.num_ranks) is None
    )


def may_merge_in_place(node: Node) -> bool:
    """Whether adapters can be merged into the base's own memory: it has the engine's dtype, and leaves once the engine has read it."""
    trainer, rollout = node.trainer, node.config.rollout
    is_merged = node.lora is not None and node.config.served_adapter is None and node.strategy is Strategy.STAGED
    return is_merged and trainer.compute_dtype == rollout.dtype


def most_tokens(node: Node) -> int:
    """The largest of `micro_batch_tokens`, its half, its quarter, ... with which no stage lacks memory that fewer tokens would save.

    At least MIN_TOKENS, and at least the longest sequence if one is set, since longer samples are refused.
    """
    ladder = _token_ladder(node)
    fewest = plan(replace(node, micro_batch_tokens=ladder[-1]))
    plans = (plan(replace(node, micro_batch_tokens=tokens)) for tokens in ladder)
    least = [fewest.lacking(stage) for stage in fewest.stages]
    for tried in plans:
        pairs = zip(map(tried.lacking, tried.stages), least, strict=True)
        if all(gpu <= least_gpu and host <= least_host for (gpu, host), (least_gpu, least_host) in pairs):
            return tried.node.micro_batch_tokens
    raise AssertionError("the fewest lack no more than themselves")


def _token_ladder(node: Node) -> list[int]:
    ladder, least = [node.micro_batch_tokens], max(MIN_TOKENS, node.config.rollout.context_length or 0)
    while ladder[-1] // 2 >= least:
        ladder.append(ladder[-1] // 2)
    return ladder


def with_fastest_checkpointing(node: Node) -> Node:
    """Applies the first checkpointing with the smallest shortage and, where layers are recomputed, keeps as many layers as fit.

    A twentieth of the GPU stays free of kept layers, in line with the accuracy of predictions (docs/benchmarks.md).
    """
    node = min((replace(node, checkpointing=rung) for rung in _rungs(node)), key=_lacking_bytes)
    if node.checkpointing is Checkpointing.NONE or node.device == "cpu":
        return node
    wary = replace(node, gpu_bytes=max(1, int(_SURE * node.gpu_bytes)))
    least = _lacking_bytes(wary)
    numbers = range(1, node.model.num_layers + 1)
    kept = bisect_left(numbers, True, key=lambda kept: _lacking_bytes(replace(wary, kept_layers=kept)) > least)
    return replace(node, kept_layers=kept)


def _rungs(node: Node) -> list[Checkpointing]:
    """What the node's backend has."""
    return [rung for rung in Checkpointing if node.trainer.backend == "fsdp" or rung is not Checkpointing.OFFLOADED]


def _lacking_bytes(node: Node) -> int:
    """Missing bytes over all stages, on a GPU and on the host, and those that tags take beyond a CPU's budget."""
    tried, budget = plan(node), node.config.memory.host_budget_bytes
    over = 0 if budget is None else max(0, tried.budget_peak.tag_bytes - budget)
    return over + sum(sum(tried.lacking(stage)) for stage in tried.stages)


def with_last_layer_kept(node: Node) -> Node:
    """Keeps all of the last layer on a GPU, if no stage needs more memory for it: backward recomputes it before any other."""
    if node.checkpointing is Checkpointing.NONE or node.device == "cpu" or node.kept_layers:
        return node
    kept = replace(node, kept_layers=1)
    is_free = all(one.gpu_bytes <= other.gpu_bytes for one, other in zip(plan(kept).stages, plan(node).stages, strict=True))
    return kept if is_free else node


def _check_tokens(node: Node) -> None:
    """Raises InvalidArgument for a given number of tokens that does not fit next to the engine's weights."""
    budget, tokens = node.config.memory.host_budget_bytes, node.config.rollout.engine.get(MAX_TOKENS)
    if not isinstance(tokens, int) or tokens <= (most := largest_pool(node)).num_tokens:
        return
    needed = tokens * kv_bytes_per_token(node)
    if budget is not None and not most.num_tokens:
        text = f"{budget} bytes leave no room for {TOKENS_KEY} = {tokens}, which take {needed} next to the engine's weights; raise it"
        raise InvalidArgument("memory.host_budget_bytes", text, needed_bytes=needed)
    where, other = (
        f"that kv_ratio = {node.config.rollout.kv_ratio:g} leaves of a GPU",
        ["raise rollout.kv_ratio or rollout.tp_size"],
    )
    if node.device == "cpu":
        where, other = "of this machine", []
        if budget is not None and budget <= node.host_bytes:
            where, other = f"that memory.host_budget_bytes = {budget} leaves", ["raise memory.host_budget_bytes"]
    fitting = _most_kv_tokens(node, most.num_tokens)
    options = ", ".join([*([f"give at most {fitting}"] if fitting else []), *other, ""])
    raise InvalidArgument(
        TOKENS_KEY,
        f"{tokens} tokens take {needed} bytes, more than the {most.num_bytes} {where}; {options}{'or ' if options else ''}remove it",
        needed_bytes=needed,
        free_bytes=most.num_bytes,
    )


def _most_kv_tokens(node: Node, limit: int) -> int:
    """The largest number up to `limit` with which the rest of the node fits too, if nothing stays; 0 if none does."""
    if node.device == "cuda":
        return limit

    def is_too_large(tokens: int) -> bool:
        tried = plan(replace(node.keeping(frozenset()), kv_tokens=tokens))
        return not (tried.fits_budget and (node.config.memory.host_budget_bytes is not None or tried.fits_host))

    numbers = range(node.longest_sequence, limit + 1)
    num_fitting = bisect_left(numbers, True, key=is_too_large)
    return numbers[num_fitting - 1] if num_fitting else 0


def starts_together(node: Node) -> bool:
    """Whether the services share no GPU, or every GPU holds both at their largest during a start.

    False where the engine sizes its cache by the memory that is free, and for a base that the engine loads for both; always true
    otherwise on a CPU.
    """
    if node.device == "cpu" or node.shares_base or node.strategy is not Strategy.STAGED:
        return node.device == "cpu" and not node.shares_base
    shared = set(node.gpus.trainer) & set(node.gpus.rollout)
    if not shared or node.kv_tokens is None:
        return not shared
    room = node.gpu_bytes * (1 - MEASURED_FREE) - MARGIN
    return all(sum(parts_at_start(node, gpu).values()) <= room for gpu in shared)


def parts_at_start(node: Node, gpu: int) -> Mapping[Part, int]:
    """Bytes on one GPU when both services are at the largest of their first start. A trainer that starts again replays steps."""
    # No step has run: the trainer computes at most the passes that it compiles.
    trial = replace(node, micro_batch_tokens=(1 + TRIAL_TOKENS) * node.trainer.ranks_per_micro_batch)
    sizes = replace(sizes_of(node), work=training_peak(trial))
    return parts_on_gpu(replace(node, strategy=Strategy.RESIDENT), sizes, Phase.TRAIN, gpu)
