"""Peak bytes of one FSDP2 rank during a step, in addition to its tags. See trainer/backends/fsdp/."""

import functools
import math

from tasuki.algorithms.vocabulary_tiles import most_logits
from tasuki.models.shape import EXPERTS, LAYER_TABLE, SPLIT_BY_COLUMNS, ModelShape
from tasuki.models.tower import Tower
from tasuki.planner.kept_bytes import (
    kept_after_mlp,
    kept_in_mlp,
    kept_in_parallel_experts,
    kept_of_layer_inputs,
    kept_of_norm,
    kept_of_routing,
    kept_of_shared_keys,
    kept_per_token,
    kept_with_attention,
)
from tasuki.planner.node import Checkpointing, Node, Part
from tasuki.planner.trainer_bytes import Bytes, layer_parts

# For what is computed in float32 whatever the parameters' dtype.
_FLOAT32 = 4
_CHUNK = 64
"""Tokens that a gated delta rule computes at once."""
TRIAL_TOKENS = 67
"""Completion tokens of each sequence in the passes that a trainer compiles at its start: a prime."""


def training_peak(node: Node) -> Bytes:
    """Peak working memory of a step, of the policy or the critic, in addition to the tags."""
    moments, critic = list(step_moments(node).values()), node.of_critic()
    if critic is not None and node.device == "cuda":
        # Each network has its own streams, whose blocks are not shared: the critic's stay while the policy trains.
        kept = _cached(critic, moment="idle")
        moments = [parts | {Part.TORCH_CACHE: parts[Part.TORCH_CACHE] + kept} for parts in moments]
    if critic is not None:
        moments += step_moments(critic).values()
    return max(moments, key=lambda parts: sum(parts.values()))


def step_moments(node: Node) -> dict[str, Bytes]:
    """Working memory at the possible peaks of ForwardBackward. Fused AdamW needs none."""
    # At the end of backward the gradient of the embedding, or of the root that it is tied in, is in transfer.
    inputs = _layer_table(node.model)
    whole = _whole_gradients(node, _largest_table(node.model) + inputs)
    if not node.gathers_layers and node.model.is_tied:
        whole += _head(node) * node.compute_bytes  # of its other use, which waits for it
    table = {Part.LAYERS: _gathered(node, layers=0) + inputs * node.compute_bytes, Part.WHOLE_GRADIENTS: whole}
    moments = {"loss": _at_loss(node), "layer": _at_layer(node), "table": table}
    if node.model.tower is not None:
        moments["tower"] = _at_tower(node, node.model.tower)
    if node.device == "cpu":
        return moments
    return {name: parts | {Part.TORCH_CACHE: _cached(node, moment=name)} for name, parts in moments.items()}


def _cached(node: Node, *, moment: str) -> int:
    """Memory cached by torch but unused at a peak: blocks of FSDP2's streams, which serve no other stream.

    With several ranks: the largest group's parameters as sent and as received, the reduced gradients of that group and a layer in
    float32, and a tile of logits with its gradient, whose blocks parameters have fragmented. With a single one: such gradients, copied,
    and a block for logits, since its parameters have fragmented a free one. megatron-core: a block for logits. Experts of several ranks,
    whose rows are as many in no two passes: half of what a layer's take. Fitted to torch's allocator on H200s for several ranks
    (docs/benchmarks.md); not measured for a single one since gradients are reduced in every micro-batch.
    """
    ranks, table, layer = node.num_ranks, _largest_table(node.model), max(_gathered_numels(node))
    trains_base, tile, rows = node.lora is None, _tile_logits(node), _rows_of_spread_experts(node) // 2
    if not node.gathers_layers:
        return _FLOAT32 * tile + rows
    if ranks > 1:
        arriving = table * node.compute_bytes * (ranks + 1) // ranks + (_FLOAT32 + node.compute_bytes) * tile
        return max(rows, arriving + (_FLOAT32 * (table + layer) // ranks if trains_base else 0))
    unused = {"layer": table, "table": layer}.get(moment, table + layer)
    return _FLOAT32 * tile + (_FLOAT32 * unused if trains_base else 0)


def offloaded_bytes(node: Node) -> int:
    """Host memory of one rank for activations of policy and critic; those of the last layer that is recomputed stay on the GPU."""
    if node.checkpointing is not Checkpointing.OFFLOADED:
        return 0
    return sum(
        max(0, network.model.num_layers - node.kept_layers - 1) * node.rank_tokens * offloaded_per_token(network)
        for network in node.networks()
    )


def offloaded_per_token(node: Node) -> int:
    """Most bytes per token that a layer keeps in host memory: its input, and attention's output."""
    return node.model.hidden_size * node.compute_bytes + _attention_per_token(node)


def _at_loss(node: Node) -> Bytes:
    """Peak at the loss: a tile of logits with its gradient, and the whole weight's gradient, with all activations present."""
    model, compute, places, tile = node.model, node.compute_bytes, _logit_places(node), _tile_logits(node)
    # With several ranks the layer before the loss is there as received. A tied head is in the root.
    head, layers = _head(node) * compute, 0 if node.num_ranks == 1 else 1
    is_gathered = node.gathers_layers and not model.is_tied
    gathered = _gathered(node, layers=layers) + (head if is_gathered else 0) + (head if node.lora is None else 0)
    # Gradients of the hidden states accumulate in float32.
    hidden = _FLOAT32 * places * model.hidden_size
    if node.device == "cuda":
        logits = (_FLOAT32 + compute) * tile + hidden
    else:
        # Logits, scaled logits and their exponentials; operands in float32.
        copies = compute < _FLOAT32
        logits = 3 * _FLOAT32 * tile + copies * hidden
        gathered += copies * _FLOAT32 * -(-tile // max(1, places)) * model.hidden_size
    # The norm before the logits, and the positions selected from its result.
    norm = model.hidden_size * (kept_of_norm(node) + compute) + 4
    last_norm = node.rank_tokens * norm + places * model.hidden_size * compute
    return {Part.LAYERS: gathered, Part.ACTIVATIONS: _kept(node) + last_norm, Part.LOGITS: logits}


def _at_layer(node: Node) -> Bytes:
    """Peak in backward of the last layer: its activations, and the next layer's parameters in transfer."""
    model, compute, trains_base = node.model, node.compute_bytes, node.lora is None
    # If the last layers are kept, they are gone when the first one is recomputed.
    is_recomputed = node.checkpointing is not Checkpointing.NONE and not node.kept_layers
    numels = _layer_numels(model, False)
    widest = numels.index(max(numels))
    # This rank's part of one matrix of spread experts is used, and has a gradient, at a time; its shard may be cast.
    own_experts = 0
    if node.trainer.expert_parallel and model.is_sparse(widest):
        own_experts = max(math.prod(model.layer(widest)[name]) for name in EXPERTS) // node.num_ranks
    is_cast = trains_base and node.param_bytes != compute
    # A kept layer's output lives longer than what is recomputed.
    recomputed = _layer_activations(node, widest) if is_recomputed else _layer_input(node)
    if is_recomputed and node.checkpointing in (Checkpointing.ATTENTION, Checkpointing.OFFLOADED):
        recomputed -= 0 if model.is_delta(widest) else node.rank_tokens * _attention_per_token(node)
    flowing = (node.mlp_tokens * _flowing_in_mlp(node, widest) + node.rank_tokens * model.hidden_size) * compute
    flowing += node.rank_tokens * _flowing_in_delta_net(node)
    if model.layer_input_size:
        # The gradient of all layers' inputs.
        flowing += node.rank_tokens * (model.num_layers * model.layer_input_size * compute - kept_after_mlp(node))
    if node.mlp_tokens < node.rank_tokens:
        # One tile, recomputed.
        flowing += node.mlp_tokens * kept_in_mlp(node, widest)
    # The LM head's gradient is there while the last layer's are computed: in compute dtype if tied, otherwise as sent.
    head = _head(node) * (compute if model.is_tied else _FLOAT32 if node.gathers_layers else 0)
    gradients = _whole_gradients(node, _gathered_numels(node)[widest] + own_experts) + (head if trains_base else 0)
    return {
        # This layer's parameters; with several ranks also the next one's, as received and as copied out.
        Part.LAYERS: _gathered(node, layers=1 if node.num_ranks == 1 else 3) + (own_experts * compute if is_cast else 0),
        Part.WHOLE_GRADIENTS: gradients,
        Part.ACTIVATIONS: _kept(node) + recomputed + flowing,
    }


def _at_tower(node: Node, tower: Tower) -> Bytes:
    """Peak of the tower's forward pass, in a block's attention or MLP, with all tokens images; nothing of the text is kept yet.

    If it is trained, of a block's backward, which is recomputed.
    """
    compute, hidden = node.compute_bytes, tower.hidden_size
    # Hidden states and their norm, queries, keys and values, and keys while they are rotated in float32; or the MLP before and after its
    # GELU, or its gate, the rest and their product, with hidden states before and after attention.
    attention = 5 * hidden * compute + 6 * hidden * _FLOAT32
    mlp = (3 * hidden + (3 if tower.has_windows else 2) * tower.intermediate_size) * compute
    per_patch, numel = max(attention, mlp), sum(map(math.prod, node.model.tower_parameters().values()))
    if node.trainer.tower_learns:
        # Of both parts norms and what autograd keeps; then gradients in attention, or of the MLP's inner part.
        inner = (6 if tower.has_windows else 3) * tower.intermediate_size
        per_patch = 10 * hidden * compute + max(6 * hidden * _FLOAT32, inner * compute + 2 * hidden * _FLOAT32)
    # Pixels, learned positions, and the rotary embedding with its angles.
    pixels, positions = math.prod(tower.patch_shape), hidden if tower.num_positions else 0
    given = pixels * compute + (positions + 7 * hidden // tower.num_heads // 2) * _FLOAT32
    return {
        Part.LAYERS: _gathered(node, layers=0) + numel * compute,
        Part.WHOLE_GRADIENTS: _whole_gradients(node, numel) if node.trainer.tower_learns else 0,
        Part.ACTIVATIONS: node.micro_batch_tokens * tower.merge_size**2 * (per_patch + given) + _kept_of_images(node),
    }


def _kept_of_images(node: Node) -> int:
    """Embeddings of images, for the text's input and after its first layers, in a micro-batch of image tokens alone.

    And the inputs of a trained tower's blocks.
    """
    tower = node.model.tower
    if tower is None:
        return 0
    inputs = tower.merge_size**2 * tower.depth * tower.hidden_size if node.trainer.tower_learns else 0
    return node.micro_batch_tokens * (tower.out_size * (1 + len(tower.deepstack)) + inputs) * node.compute_bytes


def _flowing_in_mlp(node: Node, index: int) -> int:
    """Elements per token, besides what is kept, at the peak of the MLP's backward.

    At the MLP's product, itself freed: its gradient, and those of both factors. On a GPU the latter two take the place of the factors; if
    the product is kept, it is freed only then. Parallel experts, and megatron-core's, also begin with three rows for each chosen expert,
    the results' gradients and products with them; then a gradient has arrived, and is sorted by expert.
    """
    model, num_sharing = node.model.at(index), node.trainer.tensor_parallel
    if not model.is_sparse(index):
        # With tensor parallelism also at the product of `down`: the whole gradient of its result, and that of the factor.
        whole = model.intermediate_size + num_sharing * model.hidden_size if num_sharing > 1 else 0
        return max((1 if node.fuses_mlp else 2) * model.intermediate_size, whole)
    if node.gathers_layers and not node.trainer.spreads_experts:
        return 2 * model.experts_per_token * model.expert_size
    widest_row = max(model.hidden_size, model.expert_size)
    return max(3 * model.experts_per_token * model.hidden_size, 2 * node.rows_per_token * widest_row)


def _rows_of_spread_experts(node: Node) -> int:
    """Bytes of a layer's activations, and of its MLP's backward, where several ranks share its experts."""
    if not node.trainer.spreads_experts:
        return 0
    sparse = next(index for index in range(node.model.num_layers) if node.model.is_sparse(index))
    return _layer_activations(node, sparse) + node.rank_tokens * node.compute_bytes * _flowing_in_mlp(node, sparse)


def _head(node: Node) -> int:
    """Elements of the LM head's weight that a rank uses at once."""
    return node.model.num_outputs * node.model.hidden_size // node.trainer.tensor_parallel


def _flowing_in_delta_net(node: Node) -> int:
    """Bytes per token at the peak of a recurrence's backward.

    On a GPU states of every chunk of tokens, their gradients, and four values; on a CPU what transformers' function keeps to invert a
    chunk's matrix row by row.
    """
    delta = node.model.delta
    if delta is None:
        return 0
    if node.device == "cpu":
        return _FLOAT32 * delta.num_value_heads * _CHUNK * _CHUNK // 3
    states = 2 * delta.num_value_heads * delta.key_head_dim * delta.value_head_dim // _CHUNK
    return (states + 4 * delta.value_size) * node.compute_bytes


def _whole_gradients(node: Node, numel: int) -> int:
    """Gradients of an FSDP2 group in compute dtype, and in float32 as sent; a single rank copies them to itself.

    Each micro-batch's are reduced before the next group's. megatron-core's are added to buffers parameter by parameter.
    """
    if not node.gathers_layers and node.lora is None:
        parts = layer_parts(node.model, node.trainer.tensor_parallel, node.trainer.expert_ranks)
        return max(map(math.prod, parts)) * node.compute_bytes
    sent = _FLOAT32 * (2 if node.num_ranks == 1 else 1)
    return 0 if node.lora is not None else numel * (node.compute_bytes + sent)


def _largest_table(model: ModelShape) -> int:
    """Elements of the first FSDP2 group besides the layers: the embedding, or the root that it is tied in."""
    root = sum(map(math.prod, model.root().values())) - _layer_table(model)
    return root if model.is_tied else model.vocab_size * model.hidden_size


def _layer_table(model: ModelShape) -> int:
    """Elements of the embedding of layers' own inputs, a group that is gathered only while it is used."""
    return math.prod(model.root().get(LAYER_TABLE, (0,)))


def _gathered(node: Node, *, layers: int) -> int:
    """Parameters of the root and of this many layers, whole, in compute dtype; at most all layers. megatron-core gathers none."""
    if not node.gathers_layers:
        return 0
    model = node.model
    numel = (_largest_table(model) if model.is_tied else model.hidden_size) + sum(sorted(_gathered_numels(node))[::-1][:layers])
    if layers and node.shares_base and node.num_ranks > 1:
        # Matrices that ranks have by columns, which FSDP2 copies once more to join them.
        numel += sum(math.prod(model.layer(0)[name]) for name in SPLIT_BY_COLUMNS)
    return numel * node.compute_bytes


def _gathered_numels(node: Node) -> tuple[int, ...]:
    """Elements of each layer's FSDP2 group: all parameters but spread experts."""
    return _layer_numels(node.model, node.trainer.expert_parallel)


@functools.lru_cache(maxsize=32)  # a search sums the same layers a hundred times
def _layer_numels(model: ModelShape, is_spread: bool) -> tuple[int, ...]:
    layers = map(model.layer, range(model.num_layers))
    return tuple(
        sum(math.prod(shape) for name, shape in layer.items() if not (is_spread and name.startswith(EXPERTS)))
        for layer in layers
    )


def _kept(node: Node) -> int:
    """Bytes that forward saves, over all layers."""
    num_layers, checkpointing = node.model.num_layers, node.checkpointing
    first_kept = 0 if checkpointing is Checkpointing.NONE else max(0, num_layers - node.kept_layers)
    num_present = min(2, first_kept) if checkpointing is Checkpointing.OFFLOADED else first_kept
    num_outputs = 0 if checkpointing is Checkpointing.FULL else min(num_present, node.model.num_attention_layers)
    routing = node.rank_tokens * sum(kept_of_routing(node.model, index) for index in range(first_kept))
    # megatron-core's buffer for what layers gather of the other ranks' tokens, which stays.
    whole = node.micro_batch_tokens * node.model.hidden_size * node.compute_bytes if node.trainer.tensor_parallel > 1 else 0
    return (
        whole
        + num_present * _layer_input(node)
        + num_outputs * node.rank_tokens * _attention_per_token(node)
        + routing
        + node.rank_tokens * (kept_of_layer_inputs(node) + (kept_of_shared_keys(node) if first_kept else 0))
        + _kept_of_images(node)
        + sum(_layer_activations(node, index) for index in range(first_kept, num_layers))
    )


def _layer_input(node: Node) -> int:
    return node.rank_tokens * node.model.hidden_size * node.compute_bytes


def _attention_per_token(node: Node) -> int:
    """Bytes per token that save recomputing a layer's attention.

    If prompts are shared, of two calls: continuations, which query their prompt in the second one, may be almost all tokens.
    """
    num_calls = 2 if node.trainer.prefix_sharing is not False and node.model.delta is None else 1
    return num_calls * max(kept_with_attention(node, layer) for layer in range(node.model.num_layers))


def _layer_activations(node: Node, index: int) -> int:
    model, num_shared, each = node.model.at(index), node.trainer.sequence_parallel, kept_per_token(node, index)
    if node.mlp_tokens < node.rank_tokens:
        each -= kept_in_mlp(node, index)
    if node.trainer.spreads_experts and model.is_sparse(index):
        each += kept_in_parallel_experts(node) - kept_in_mlp(node, index)
    if num_shared > 1:  # attention's output on its way back, and repeated key heads
        repeats = max(1, num_shared // model.num_kv_heads)
        each += (model.query_size + 2 * (repeats - 1) * model.kv_size) * node.compute_bytes
    return node.rank_tokens * each


def _logit_places(node: Node) -> int:
    places = node.rank_tokens * node.trainer.tensor_parallel
    return places if node.logit_tokens is None else min(node.logit_tokens, places)


def _tile_logits(node: Node) -> int:
    """Logits present at a time."""
    model, places = node.model, _logit_places(node)
    vocab_size = model.num_outputs // node.trainer.tensor_parallel
    return most_logits(places, hidden_size=model.hidden_size, vocab_size=vocab_size, device=node.device)
