"""Bytes that autograd saves of a layer for backward."""

import functools

from tasuki.config.trainer_schema import LoraConfig
from tasuki.models.shape import Latent, ModelShape, QkNorm
from tasuki.planner.node import Node

_FLOAT32 = 4
_INT64 = 8


def kept_per_token(node: Node, layer: int) -> int:
    """Bytes that autograd saves per token in one layer of transformers' implementation, with flash attention.

    Each norm: its input, one float32, a factor of its last product unless fused, and its result where a linear layer uses it. Attention.
    The MLP, see kept_in_mlp. On a GPU pointwise operators are fused, see trainer/modules/pointwise.py. Of adapters what their products
    need; outputs with DoRA; with dropout what is left of the inputs, and a mask. An auxiliary loss over all probabilities of a router, of
    which that of gpt-oss else computes the chosen ones alone.
    """
    node = node.at(layer)
    model, compute, lora = node.model, node.compute_bytes, node.lora
    norm = kept_of_norm(node)
    # Without a preceding norm, attention and MLP save their input themselves.
    own_inputs = (2 - len(model.norms)) * model.hidden_size * compute
    post_norm = _kept_of_post_norm(node)
    pre_norm = post_norm + model.hidden_size * compute
    kept = len(model.norms) * pre_norm + len(model.post_norms) * post_norm + own_inputs
    kept += _kept_of_delta_net(node) if model.is_delta(layer) else _kept_of_attention(node, norm=norm)
    kept += kept_in_mlp(node, layer)
    if model.layer_input_size:
        kept += kept_after_mlp(node) - post_norm
    if lora is not None:
        scaled = width(lora, model, layer, dim=0) if lora.use_dora else 0
        dropped = width(lora, model, layer, dim=1) if lora.dropout else 0
        kept += (7 * lora.max_rank + scaled) * compute + dropped * (compute + 1)
        if lora.experts and model.is_sparse(layer):
            kept += 2 * model.experts_per_token * lora.max_rank * compute
    if node.trainer.router_aux_loss_coef > 0 and model.has_biased_experts and model.is_sparse(layer):
        kept += _FLOAT32 * model.num_experts
    return kept


def kept_after_mlp(node: Node) -> int:
    """What is gone at the peak of an MLP's backward, if its layer has inputs of its own: norms of the MLP and of what follows, and of the
    latter the gate's input, its result before and after the activation, and the product.
    """
    model = node.model
    if not model.layer_input_size:
        return 0
    return (model.hidden_size + 3 * model.layer_input_size) * node.compute_bytes + 2 * _kept_of_post_norm(node)


@functools.lru_cache
def width(lora: LoraConfig, model: ModelShape, layer: int, *, dim: int) -> int:
    """Outputs (0) or inputs (1) of a layer's linear layers with adapters, per token."""
    return sum(shape[dim] for name, shape in lora.layers(model).items() if name.startswith(f"model.layers.{layer}."))


def kept_in_mlp(node: Node, layer: int) -> int:
    """The part of it inside the MLP: gate, up, their product unless it is recomputed, and the activation unless fused."""
    model, compute = node.model.at(layer), node.compute_bytes
    parts = 2 + node.keeps_product + (node.device == "cpu")
    if not model.is_sparse(layer):
        return parts * model.intermediate_size * compute
    # Per chosen expert: the token, gate and up, their product, the result and its weight; four indices and a mask for sorting.
    row = 2 * model.hidden_size + 4 * model.expert_size + 1
    experts = model.experts_per_token * (row * compute + 4 * 8 + 1) + 4 * model.num_experts
    if model.has_biased_experts:
        # No activation; logits in the place of probabilities, but those of the chosen, too; an index of biases.
        experts += model.experts_per_token * (_FLOAT32 + _INT64 - model.expert_size * compute)
        experts -= (_FLOAT32 - compute) * model.num_experts
    if (model.has_router_bias or model.latent is not None) and compute < _FLOAT32:
        experts += _FLOAT32 * model.hidden_size  # the router's input
    return experts + _kept_in_shared_expert(node, parts)


def _kept_in_shared_expert(node: Node, parts: int) -> int:
    # With a gate its result, which the token's gate scales, and the gate.
    gated = (node.model.hidden_size + 1) * node.compute_bytes if node.model.has_shared_expert_gate else 0
    return parts * node.model.shared_expert_size * node.compute_bytes + gated


def kept_in_parallel_experts(node: Node) -> int:
    """Bytes per token inside the MLP of a layer whose experts are spread over ranks.

    A row: the token, gate and up, the activation, their product, and two indices. Per chosen expert: its result, its weight and three
    indices. The router's probabilities.
    """
    model, compute = node.model, node.compute_bytes
    row = (model.hidden_size + 4 * model.expert_size) * compute + 2 * _INT64
    choice = (model.hidden_size + 1) * compute + 3 * _INT64
    kept = node.rows_per_token * row + model.experts_per_token * choice + _FLOAT32 * model.num_experts
    return kept + _kept_in_shared_expert(node, 4)


def kept_of_layer_inputs(node: Node) -> int:
    """Bytes per token of all layers' own inputs, with a norm before."""
    model, compute = node.model, node.compute_bytes
    if not model.layer_input_size:
        return 0
    elements = model.num_layers * model.layer_input_size
    return elements * (kept_of_norm(node) + compute) + model.num_layers * _kept_of_mean(node) + model.hidden_size * compute


def kept_of_shared_keys(node: Node) -> int:
    """Bytes per token of keys and values that later layers use, even if the layers that have computed them are recomputed."""
    layers = map(node.model.at, range(node.model.num_layers))
    sizes = {(each.num_kv_heads, each.head_dim): each.kv_size for each in layers if not each.has_own_keys}
    return 2 * sum(sizes.values()) * node.compute_bytes


def kept_of_routing(model: ModelShape, layer: int) -> int:
    """Choice of experts of one token in a recomputed layer: probabilities and indices."""
    return model.experts_per_token * (_FLOAT32 + _INT64) if model.is_sparse(layer) else 0


def kept_with_attention(node: Node, layer: int) -> int:
    """Bytes per token in one layer that save recomputing its attention: the output and one float32 per head.

    0 where attention is capped and for a gated delta net: these are no torch operators, and are recomputed.
    """
    model = node.model.at(layer)
    is_recomputed = model.caps_attention or model.is_delta(layer)
    return 0 if is_recomputed else model.query_size * node.compute_bytes + _FLOAT32 * model.num_heads


def _kept_of_attention(node: Node, *, norm: int) -> int:
    """Bytes per token: norms of queries and keys; rotated queries, keys, values and the output, and one float32 per head.

    If capped, everything has the size of the queries, plus per key and head the cap's result, the softmax in float32, and its copy.
    norm: bytes per element of a norm.
    """
    model, compute = node.model, node.compute_bytes
    query, kv, heads = model.query_size, model.kv_size, model.num_heads
    if not node.gathers_layers:
        return _kept_of_megatron_attention(node)
    if model.latent is not None:
        return _kept_of_latent_attention(model, model.latent, compute, norm=norm)
    kv, kv_heads = (kv, model.num_kv_heads) if model.has_own_keys else (0, 0)
    norms = 0
    if model.qk_norm is not None:
        sums = heads + kv_heads if model.qk_norm is QkNorm.HEAD else 2
        norms = (query + kv) * norm + sums * _kept_of_mean(node)
    if model.has_value_norm:
        is_same = not model.has_value_projection and compute == _FLOAT32
        norms += (0 if is_same else kv * (compute if node.device == "cuda" else _FLOAT32)) + kv_heads * _kept_of_mean(node)
    if model.caps_attention:
        num_keys, copy = min(node.longest_sequence, node.micro_batch_tokens), compute if compute < _FLOAT32 else 0
        return norms + 4 * query * compute + heads * num_keys * (compute + _FLOAT32 + copy)
    kept = 2 * query + 2 * kv
    if model.has_fused_qkv:
        # Values are a view of all three.
        kept += query + kv
    if model.joins_rotated:
        # The output also in another layout.
        kept += query
    if model.has_output_gate:
        # The gate's sigmoid, and the scaled output. A norm in float32 keeps its input without a copy, together with the gate.
        kept += (3 if compute == _FLOAT32 else 2) * query
    return norms + kept * compute + 4 * heads


def _kept_of_megatron_attention(node: Node) -> int:
    """Bytes per token: as above, of which keys, and on a CPU values, are views of one product with all three.

    Norms' queries are a copy unless a rank has a single key head.
    """
    model, compute, is_fused = node.model, node.compute_bytes, node.device == "cuda"
    query, kv, norms = model.query_size, model.kv_size, 0
    kept = 2 * query + (2 if is_fused else 1) * kv
    if model.qk_norm is not None or not is_fused:
        kept += query + 2 * kv
    if model.qk_norm is not None:
        is_input_kept = is_fused or compute == _FLOAT32
        kept += query if is_input_kept and model.num_kv_heads > node.trainer.tensor_parallel else 0
        each = 0 if is_fused else _FLOAT32 if is_input_kept else 2 * _FLOAT32
        norms = (query + kv) * each + _FLOAT32 * (model.num_heads + model.num_kv_heads)
    return kept * compute + norms + _FLOAT32 * model.num_heads


def _kept_of_latent_attention(model: ModelShape, latent: Latent, compute_bytes: int, *, norm: int) -> int:
    """Bytes per token: both norms of small vectors and their results; joined queries and keys, values, the output, also in another layout,
    and one float32 per head.

    Values and output are padded to the size of keys; otherwise values are a view of what they are projected with.
    """
    heads, ranks = model.num_heads, latent.kv_rank + (latent.query_rank or 0)
    norms = ranks * (norm + compute_bytes) + 4 * (1 if latent.query_rank is None else 2)
    if compute_bytes == _FLOAT32:
        norms += _FLOAT32 * latent.rope_dim  # of one tensor with the small vector
    is_padded = latent.value_dim < model.head_dim
    projected = model.head_dim if is_padded else model.head_dim - latent.rope_dim + latent.value_dim
    output = max(model.head_dim, latent.value_dim) + latent.value_dim
    return norms + (2 * model.query_size + heads * (projected + output)) * compute_bytes + 4 * heads


def _kept_of_delta_net(node: Node) -> int:
    """Bytes per token: inputs and results of the convolution, queries and keys for every value head, what the recurrence keeps, and the
    gated norm in float32.

    On a GPU flash-linear-attention's kernels also keep normalized queries and keys, and 64 numbers of each head.
    """
    delta, is_fused = node.model.delta, node.device == "cuda"
    assert delta is not None
    heads, value, repeated = delta.num_value_heads, delta.value_size, delta.num_value_heads * delta.key_head_dim
    recurrence = 2 * repeated + value + ((2 * repeated + 64 * heads) if is_fused else 0)
    # The strength of what is written, twice; the gated result.
    elements = 2 * delta.conv_size + recurrence + 2 * heads + value
    # In the norm its input, the same normalized and scaled, the gate, and its activation.
    floats = 5 * value + 4 * heads
    return elements * node.compute_bytes + floats * _FLOAT32 + (0 if is_fused else 5 * _INT64)


def _kept_of_post_norm(node: Node) -> int:
    return node.model.hidden_size * kept_of_norm(node) + _kept_of_mean(node)


def _kept_of_mean(node: Node) -> int:
    """Bytes of a norm beside its elements: a factor in float32, and of Gemma 4's, unless fused, the mean whose power that is."""
    return 2 * _FLOAT32 if node.model.has_value_norm and node.device == "cpu" else _FLOAT32


def kept_of_norm(node: Node) -> int:
    """Bytes per element: the input, in float32 unless the norm is fused; a fused norm saves no factor of its product."""
    if node.device == "cuda" and not node.model.has_offset_norms:
        return node.compute_bytes
    return _FLOAT32 + (_FLOAT32 if node.model.has_float_norms or not node.gathers_layers else node.compute_bytes)
