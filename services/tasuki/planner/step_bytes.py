"""Peak bytes of one FSDP2 rank during a step, in addition to its tags. See trainer/backends/fsdp/."""

from __future__ import annotations

import math

from tasuki.algorithms.vocabulary_tiles import most_logits
from tasuki.models.shape import EXPERTS, SPLIT_BY_COLUMNS, ModelShape, Shapes
from tasuki.planner.kept_bytes import (
    kept_in_mlp,
    kept_in_parallel_experts,
    kept_of_routing,
    kept_per_token,
    kept_with_attention,
)
from tasuki.planner.layout import Checkpointing, Layout, Part
from tasuki.planner.trainer_bytes import Bytes

# For what is computed in float32 whatever the parameters' dtype.
_FLOAT32 = 4
TRIAL_TOKENS = 67
"""Completion tokens of each sequence in the passes that a trainer compiles at its start: a prime."""


def training_peak(layout: Layout) -> Bytes:
    """Peak working memory of a step, of the policy or the critic, in addition to the tags."""
    moments = list(step_moments(layout).values())
    critic = layout.of_critic()
    if critic is None:
        return _fullest(moments)
    if layout.device == "cuda":
        # Each network has its own streams, whose blocks are not shared: the critic's stay while the policy trains.
        kept = _cached(critic, moment="idle")
        moments = [parts | {Part.TORCH_CACHE: parts[Part.TORCH_CACHE] + kept} for parts in moments]
    return _fullest([*moments, *step_moments(critic).values()])


def _fullest(moments: list[Bytes]) -> Bytes:
    return max(moments, key=lambda parts: sum(parts.values()))


def step_moments(layout: Layout) -> dict[str, Bytes]:
    """Working memory at the possible peaks of ForwardBackward. Fused AdamW needs none."""
    moments = {"loss": _at_loss(layout), "layer": _at_layer(layout), "table": _at_table(layout)}
    if layout.device == "cpu":
        return moments
    return {name: parts | {Part.TORCH_CACHE: _cached(layout, moment=name)} for name, parts in moments.items()}


def _cached(layout: Layout, *, moment: str) -> int:
    """Memory cached by torch but unused at a peak: blocks of FSDP2's streams, which serve no other stream.

    With several ranks: the largest group's parameters as sent and as received, the reduced gradients of that group and a layer in
    float32, and a tile of logits with its gradient, whose blocks parameters have fragmented. With a single one: such gradients, copied,
    and a block for logits, since its parameters have fragmented a free one. Fitted to torch's allocator on H200s for several ranks
    (docs/benchmarks.md); not measured for a single one since gradients are reduced in every micro-batch.
    """
    model, ranks = layout.model, layout.num_ranks
    table, layer = _largest_table(model), max(_gathered_numel(layout, index) for index in range(model.num_layers))
    trains_base = layout.lora_rank is None
    if ranks > 1:
        arriving = table * layout.compute_bytes * (ranks + 1) // ranks
        tile = (_FLOAT32 + layout.compute_bytes) * _tile_logits(layout)
        return arriving + tile + (_FLOAT32 * (table + layer) // ranks if trains_base else 0)
    logits = _FLOAT32 * _tile_logits(layout)
    unused = {"layer": table, "table": layer}.get(moment, table + layer)
    return logits + (_FLOAT32 * unused if trains_base else 0)


def offloaded_bytes(layout: Layout) -> int:
    """Host memory of one rank for activations of policy and critic; those of the last layer that is recomputed stay on the GPU."""
    if layout.checkpointing is not Checkpointing.OFFLOADED:
        return 0
    critic, num_layers = layout.of_critic(), max(0, layout.model.num_layers - layout.kept_layers - 1)
    of_critic = 0 if critic is None else offloaded_bytes(critic)
    return num_layers * layout.rank_tokens * offloaded_per_token(layout) + of_critic


def offloaded_per_token(layout: Layout) -> int:
    """Bytes per token that a layer keeps in host memory: its input, and attention's output."""
    return layout.model.hidden_size * layout.compute_bytes + _attention_per_token(layout)


def _at_loss(layout: Layout) -> Bytes:
    """Peak at the loss: a tile of logits with its gradient, and the whole weight's gradient, with all activations present."""
    model, compute, places, tile = layout.model, layout.compute_bytes, _logit_places(layout), _tile_logits(layout)
    gathered = _gathered_layers(layout, at_loss=True) + _gathered_head(layout)
    if layout.lora_rank is None:
        gathered += model.num_outputs * model.hidden_size * compute
    # Gradients of the hidden states accumulate in float32.
    hidden = _FLOAT32 * places * model.hidden_size
    if layout.device == "cuda":
        logits = (_FLOAT32 + compute) * tile + hidden
    else:
        # Logits, scaled logits and their exponentials; operands in float32.
        copies = compute < _FLOAT32
        logits = 3 * _FLOAT32 * tile + copies * hidden
        gathered += copies * _FLOAT32 * -(-tile // max(1, places)) * model.hidden_size
    return {
        Part.LAYERS: gathered,
        Part.ACTIVATIONS: _kept(layout) + _last_norm(layout),
        Part.LOGITS: logits,
    }


def _at_layer(layout: Layout) -> Bytes:
    """Peak in backward of the last layer: its activations, and the next layer's parameters in transfer."""
    model, compute = layout.model, layout.compute_bytes
    # If the last layers are kept, they are gone when the first one is recomputed.
    is_recomputed = layout.checkpointing is not Checkpointing.NONE and not layout.kept_layers
    widest = max(range(model.num_layers), key=lambda index: _numel(model.layer(index)))
    own_experts = _own_expert_matrix(layout, widest)
    # A kept layer's output lives longer than what is recomputed.
    recomputed = _layer_activations(layout, widest) if is_recomputed else _layer_input(layout)
    if is_recomputed and layout.checkpointing in (Checkpointing.ATTENTION, Checkpointing.OFFLOADED):
        recomputed -= _attention_output(layout)
    flowing = (layout.mlp_tokens * _flowing_in_mlp(layout, widest) + layout.rank_tokens * model.hidden_size) * compute
    if layout.has_mlp_tiles:
        # One tile, recomputed.
        flowing += layout.mlp_tokens * _kept_in_mlp(layout, widest)
    return {
        # This layer's parameters; with several ranks also the next one's, as received and as copied out.
        Part.LAYERS: _gathered_layers(layout, at_loss=False) + _cast_bytes(layout, own_experts),
        Part.WHOLE_GRADIENTS: _whole_gradients(layout, _gathered_numel(layout, widest) + own_experts)
        + _held_before_layers(layout),
        Part.ACTIVATIONS: _kept(layout) + recomputed + flowing,
    }


def _flowing_in_mlp(layout: Layout, index: int) -> int:
    """Elements per token, besides what is kept, at the peak of the MLP's backward.

    At the MLP's product, itself freed: its gradient, and those of both factors. On a GPU the latter two take the place of the factors; if
    the product is kept, it is freed only then. Parallel experts also begin with three rows for each chosen expert, the results' gradients
    and products with them; then a gradient has arrived, and is sorted by expert.
    """
    model = layout.model
    if not model.is_sparse(index):
        return (1 if _is_fused(layout) else 2) * model.intermediate_size
    if not layout.expert_parallel:
        return 2 * model.experts_per_token * model.expert_size
    return max(
        3 * model.experts_per_token * model.hidden_size, 2 * layout.rows_per_token * max(model.hidden_size, model.expert_size)
    )


def _at_table(layout: Layout) -> Bytes:
    """Peak at the end of backward: the gradient of the embedding, or of the root that it is tied in, in transfer."""
    return {
        Part.LAYERS: _gathered(layout, layers=0),
        Part.WHOLE_GRADIENTS: _whole_gradients(layout, _largest_table(layout.model)),
    }


def _whole_gradients(layout: Layout, numel: int) -> int:
    """Gradients of an FSDP2 group in compute dtype, and in float32 as sent; a single rank copies them to itself.

    Each micro-batch's are reduced before the next group's.
    """
    if layout.lora_rank is not None:
        return 0
    return numel * (layout.compute_bytes + _FLOAT32 * (2 if layout.num_ranks == 1 else 1))


def _held_before_layers(layout: Layout) -> int:
    """Gradient of the LM head while the last layer's are computed: in compute dtype if tied, otherwise as sent."""
    model = layout.model
    if layout.lora_rank is not None:
        return 0
    vocabulary = model.num_outputs * model.hidden_size
    return vocabulary * (layout.compute_bytes if model.is_tied else _FLOAT32)


def _largest_table(model: ModelShape) -> int:
    """Elements of the largest FSDP2 group besides the layers: the embedding, or the root that it is tied in."""
    return _numel(model.root()) if model.is_tied else model.vocab_size * model.hidden_size


def _gathered_head(layout: Layout) -> int:
    """The whole LM head in compute dtype, unless it is in the root."""
    model = layout.model
    return 0 if model.is_tied else model.num_outputs * model.hidden_size * layout.compute_bytes


def _gathered(layout: Layout, *, layers: int) -> int:
    """Parameters of the root and of this many layers, whole, in compute dtype; at most all layers."""
    model = layout.model
    root = _numel(model.root()) if model.is_tied else model.hidden_size
    units = sorted((_gathered_numel(layout, index) for index in range(model.num_layers)), reverse=True)
    return (root + sum(units[:layers]) + (_joined_columns(layout) if layers else 0)) * layout.compute_bytes


def _gathered_layers(layout: Layout, *, at_loss: bool) -> int:
    """Same, of the root and the layers present where forward ends, or in backward of the last layer.

    With several ranks a layer is there as received, too: the one before the loss, and the next one of backward.
    """
    is_alone = layout.num_ranks == 1
    return _gathered(layout, layers=(0 if is_alone else 1) if at_loss else (1 if is_alone else 3))


def _gathered_numel(layout: Layout, index: int) -> int:
    """Elements of a layer's FSDP2 group: all parameters but spread experts."""
    layer = layout.model.layer(index)
    return _numel({name: shape for name, shape in layer.items() if not (layout.expert_parallel and name in EXPERTS)})


def _own_expert_matrix(layout: Layout, index: int) -> int:
    """Elements of this rank's part of the largest matrix of spread experts: one is used, and has a gradient, at a time."""
    if not (layout.expert_parallel and layout.model.is_sparse(index)):
        return 0
    layer = layout.model.layer(index)
    return max(math.prod(layer[name]) for name in EXPERTS) // layout.num_ranks


def _cast_bytes(layout: Layout, numel: int) -> int:
    """A shard's copy in compute dtype; frozen ones have it."""
    is_cast = layout.lora_rank is None and layout.param_bytes != layout.compute_bytes
    return numel * layout.compute_bytes if is_cast else 0


def _joined_columns(layout: Layout) -> int:
    """Elements of a layer's matrices that ranks have by columns, which FSDP2 copies once more to join them."""
    if not layout.shares_base or layout.num_ranks == 1:
        return 0
    layer = layout.model.layer(0)
    return sum(math.prod(layer[name]) for name in SPLIT_BY_COLUMNS)


def _kept(layout: Layout) -> int:
    """Bytes that forward saves, over all layers."""
    num_layers, checkpointing = layout.model.num_layers, layout.checkpointing
    first_kept = 0 if checkpointing is Checkpointing.NONE else max(0, num_layers - layout.kept_layers)
    each = _layer_input(layout) + (0 if checkpointing is Checkpointing.FULL else _attention_output(layout))
    num_present = min(2, first_kept) if checkpointing is Checkpointing.OFFLOADED else first_kept
    kept = sum(_layer_activations(layout, index) for index in range(first_kept, num_layers))
    return num_present * each + _routing(layout, first_kept) + kept


def _routing(layout: Layout, num_layers: int) -> int:
    """The choice of experts of the first layers."""
    return layout.rank_tokens * sum(kept_of_routing(layout.model, index) for index in range(num_layers))


def _layer_input(layout: Layout) -> int:
    return layout.rank_tokens * layout.model.hidden_size * layout.compute_bytes


def _attention_output(layout: Layout) -> int:
    return layout.rank_tokens * _attention_per_token(layout)


def _attention_per_token(layout: Layout) -> int:
    """Bytes per token that save recomputing a layer's attention.

    If prompts are shared, of two calls: continuations, which query their prompt in the second one, may be almost all tokens.
    """
    num_calls = 2 if layout.shares_prompts else 1
    return num_calls * kept_with_attention(layout.model, compute_bytes=layout.compute_bytes)


def _layer_activations(layout: Layout, index: int) -> int:
    each = kept_per_token(
        layout.model,
        index,
        num_keys=min(layout.longest_sequence, layout.micro_batch_tokens),
        compute_bytes=layout.compute_bytes,
        lora_rank=layout.lora_rank,
        is_fused=layout.device == "cuda",
        keeps_product=_keeps_product(layout),
    )
    if layout.has_mlp_tiles:
        each -= _kept_in_mlp(layout, index)
    if layout.expert_parallel and layout.model.is_sparse(index):
        spread = kept_in_parallel_experts(
            layout.model, rows_per_token=layout.rows_per_token, compute_bytes=layout.compute_bytes
        )
        each += spread - _kept_in_mlp(layout, index)
    return layout.rank_tokens * (each + _kept_to_share(layout))


def _kept_in_mlp(layout: Layout, index: int) -> int:
    """Bytes per token."""
    return kept_in_mlp(
        layout.model,
        index,
        compute_bytes=layout.compute_bytes,
        is_fused=layout.device == "cuda",
        keeps_product=_keeps_product(layout),
    )


def _is_fused(layout: Layout) -> bool:
    """Whether MLPs use our own kernels."""
    return layout.device == "cuda" and not layout.is_compiled


def _keeps_product(layout: Layout) -> bool:
    """Whether MLPs keep activation(gate) * up for backward: an adapter needs it, and NONE keeps everything."""
    return not _is_fused(layout) or layout.lora_rank is not None or layout.checkpointing is Checkpointing.NONE


def _kept_to_share(layout: Layout) -> int:
    """Bytes per token if ranks share sequences: attention's output on its way back, and repeated key heads."""
    model, num_ranks = layout.model, layout.sequence_parallel
    if num_ranks == 1:
        return 0
    repeats = max(1, num_ranks // model.num_kv_heads)
    return (model.query_size + 2 * (repeats - 1) * model.kv_size) * layout.compute_bytes


def _last_norm(layout: Layout) -> int:
    """The norm before the logits, and the positions selected from its result."""
    hidden, compute = layout.model.hidden_size, layout.compute_bytes
    places = _logit_places(layout) * hidden * compute
    is_fused = layout.device == "cuda" and not layout.model.has_offset_norms
    kept = 2 * compute if is_fused else _FLOAT32 + 2 * compute
    return layout.rank_tokens * (hidden * kept + 4) + places


def _logit_places(layout: Layout) -> int:
    return layout.rank_tokens if layout.logit_tokens is None else min(layout.logit_tokens, layout.rank_tokens)


def _tile_logits(layout: Layout) -> int:
    """Logits present at a time."""
    model, places = layout.model, _logit_places(layout)
    return most_logits(places, hidden_size=model.hidden_size, vocab_size=model.num_outputs, device=layout.device)


def _numel(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
