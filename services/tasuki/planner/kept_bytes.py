"""Bytes that autograd saves of a layer for backward."""

from tasuki.models.shape import Latent, ModelShape, QkNorm

_FLOAT32 = 4
_INT64 = 8


def kept_per_token(
    model: ModelShape,
    layer: int,
    *,
    num_keys: int,
    compute_bytes: int = 2,
    lora_rank: int | None = None,
    has_expert_adapters: bool = False,
    scaled_outputs: int = 0,
    dropped_inputs: int = 0,
    is_fused: bool = False,
    keeps_product: bool = True,
    is_balanced: bool = False,
) -> int:
    """Bytes that autograd saves per token in one layer of transformers' implementation, with flash attention.

    Each norm: its input, one float32, a factor of its last product unless fused, and its result where a linear layer uses it. Attention.
    The MLP, see kept_in_mlp. num_keys: of the longest sequence, where attention is capped. is_fused: as on a GPU, see
    trainer/modules/pointwise.py. scaled_outputs: of linear layers with DoRA. dropped_inputs: of those
    with dropout, which keep what is left and a mask. is_balanced: by an auxiliary loss over all probabilities of a router, of which that of
    gpt-oss else computes the chosen ones alone.
    """
    hidden = model.hidden_size
    # Without a preceding norm, attention and MLP save their input themselves.
    own_inputs = (2 - len(model.norms)) * hidden * compute_bytes
    norm = _kept_of_norm(model, compute_bytes, is_fused=is_fused)
    post_norm = hidden * norm + 4
    pre_norm = post_norm + hidden * compute_bytes
    norms = len(model.norms) * pre_norm + len(model.post_norms) * post_norm + own_inputs
    if model.is_delta(layer):
        attention = _kept_of_delta_net(model, compute_bytes, is_fused=is_fused)
    else:
        attention = _kept_of_attention(model, compute_bytes, num_keys=num_keys, norm=norm)
    mlp = kept_in_mlp(model, layer, compute_bytes=compute_bytes, is_fused=is_fused, keeps_product=keeps_product)
    adapters = (
        0 if lora_rank is None else (7 * lora_rank + scaled_outputs) * compute_bytes + dropped_inputs * (compute_bytes + 1)
    )
    if lora_rank is not None and has_expert_adapters and model.is_sparse(layer):
        adapters += 2 * model.experts_per_token * lora_rank * compute_bytes
    if is_balanced and model.has_biased_experts and model.is_sparse(layer):
        mlp += _FLOAT32 * model.num_experts
    return norms + attention + mlp + adapters


def kept_in_mlp(
    model: ModelShape, layer: int, *, compute_bytes: int = 2, is_fused: bool = False, keeps_product: bool = True
) -> int:
    """The part of it inside the MLP: gate, up, their product unless it is recomputed, and the activation unless fused."""
    if model.is_sparse(layer):
        # Per chosen expert: the token, gate and up, their product, the result and its weight; four indices and a mask for sorting.
        width = 2 * model.hidden_size + 4 * model.expert_size + 1
        experts = model.experts_per_token * (width * compute_bytes + 4 * 8 + 1) + 4 * model.num_experts
        if model.has_biased_experts:
            # No activation; logits in the place of probabilities, but those of the chosen, too; an index of biases.
            experts += model.experts_per_token * (_FLOAT32 + _INT64 - model.expert_size * compute_bytes)
            experts -= (_FLOAT32 - compute_bytes) * model.num_experts
        if (model.has_router_bias or model.latent is not None) and compute_bytes < _FLOAT32:
            experts += _FLOAT32 * model.hidden_size  # the router's input
        return experts + _kept_in_shared_expert(model, compute_bytes, is_fused=is_fused, keeps_product=keeps_product)
    return (2 + keeps_product + (not is_fused)) * model.intermediate_size * compute_bytes


def _kept_in_shared_expert(model: ModelShape, compute_bytes: int, *, is_fused: bool = False, keeps_product: bool = True) -> int:
    # The result, which the token's gate scales, and the gate.
    gated = (model.hidden_size + 1) * compute_bytes if model.has_shared_expert_gate else 0
    return (2 + keeps_product + (not is_fused)) * model.shared_expert_size * compute_bytes + gated


def kept_in_parallel_experts(model: ModelShape, *, rows_per_token: int, compute_bytes: int = 2) -> int:
    """Bytes per token inside the MLP of a layer whose experts are spread over ranks, which compute `rows_per_token` rows for it.

    A row: the token, gate and up, the activation, their product, and two indices. Per chosen expert: its result, its weight and three
    indices. The router's probabilities.
    """
    row = (model.hidden_size + 4 * model.expert_size) * compute_bytes + 2 * _INT64
    choice = (model.hidden_size + 1) * compute_bytes + 3 * _INT64
    shared = _kept_in_shared_expert(model, compute_bytes)
    return rows_per_token * row + model.experts_per_token * choice + _FLOAT32 * model.num_experts + shared


def kept_of_routing(model: ModelShape, layer: int) -> int:
    """Choice of experts of one token in a recomputed layer: probabilities and indices."""
    return model.experts_per_token * (_FLOAT32 + _INT64) if model.is_sparse(layer) else 0


def kept_with_attention(model: ModelShape, layer: int, *, compute_bytes: int = 2) -> int:
    """Bytes per token in one layer that save recomputing its attention: the output and one float32 per head.

    0 where attention is capped and for a gated delta net: these are no torch operators, and are recomputed.
    """
    is_recomputed = model.caps_attention or model.is_delta(layer)
    return 0 if is_recomputed else model.query_size * compute_bytes + _FLOAT32 * model.num_heads


def _kept_of_attention(model: ModelShape, compute_bytes: int, *, num_keys: int, norm: int) -> int:
    """Bytes per token: norms of queries and keys; rotated queries, keys, values and the output, and one float32 per head.

    If capped, everything has the size of the queries, plus per key and head the cap's result, the softmax in float32, and its copy.
    norm: bytes per element of a norm.
    """
    query, kv, heads = model.query_size, model.kv_size, model.num_heads
    if model.latent is not None:
        return _kept_of_latent_attention(model, model.latent, compute_bytes, norm=norm)
    norms = 0
    if model.qk_norm is not None:
        sums = heads + model.num_kv_heads if model.qk_norm is QkNorm.HEAD else 2
        norms = (query + kv) * norm + 4 * sums
    if model.caps_attention:
        copy = compute_bytes if compute_bytes < _FLOAT32 else 0
        return norms + 4 * query * compute_bytes + heads * num_keys * (compute_bytes + _FLOAT32 + copy)
    kept = 2 * query + 2 * kv
    if model.has_fused_qkv:
        # Values are a view of all three.
        kept += query + kv
    if model.joins_rotated:
        # The output also in another layout.
        kept += query
    if model.has_output_gate:
        # The gate's sigmoid, and the scaled output. A norm in float32 keeps its input without a copy, together with the gate.
        kept += (3 if compute_bytes == _FLOAT32 else 2) * query
    return norms + kept * compute_bytes + 4 * heads


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


def _kept_of_delta_net(model: ModelShape, compute_bytes: int, *, is_fused: bool) -> int:
    """Bytes per token: inputs and results of the convolution, queries and keys for every value head, what the recurrence keeps, and the
    gated norm in float32.

    is_fused: with flash-linear-attention's kernels, which also keep normalized queries and keys, and 64 numbers of each head.
    """
    delta = model.delta
    assert delta is not None
    heads, value, repeated = delta.num_value_heads, delta.value_size, delta.num_value_heads * delta.key_head_dim
    recurrence = 2 * repeated + value + ((2 * repeated + 64 * heads) if is_fused else 0)
    # The strength of what is written, twice; the gated result.
    elements = 2 * delta.conv_size + recurrence + 2 * heads + value
    # In the norm its input, the same normalized and scaled, the gate, and its activation.
    floats = 5 * value + 4 * heads
    return elements * compute_bytes + floats * _FLOAT32 + (0 if is_fused else 5 * _INT64)


def _kept_of_norm(model: ModelShape, compute_bytes: int, *, is_fused: bool) -> int:
    """Bytes per element: the input, in float32 unless the norm is fused; a fused norm saves no factor of its product."""
    if is_fused and not model.has_offset_norms:
        return compute_bytes
    return _FLOAT32 + (_FLOAT32 if model.has_float_norms else compute_bytes)
