"""Attention of a vision tower within images or windows: one call for all of equal length, where transformers makes one for each."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# With "flash" in its name transformers gives it the bounds of all sequences.
IMPLEMENTATION = "tasuki_flash_by_length"


def attend_by_length(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """Results [1, P, H, D] of sequences whose boundaries are `cu_seq_lens_q`. query, key, value: [1, H, P, D]."""
    bounds_S = cu_seq_lens_q.long()
    starts_S, lengths_S = bounds_S[:-1], bounds_S.diff()
    lengths = lengths_S.unique().tolist()
    rows = [(starts_S[lengths_S == length, None] + torch.arange(length, device=query.device)).flatten() for length in lengths]
    results: list[Tensor] = []
    for length, rows_P in zip(lengths, rows, strict=True):
        packed = (each[0] if len(lengths) == 1 else each[0].index_select(1, rows_P) for each in (query, key, value))
        q, k, v = (each.unflatten(1, (-1, length)).transpose(0, 1) for each in packed)
        results.append(scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1))
    if len(lengths) == 1:
        return results[0].unsqueeze(0), None
    return torch.cat(results)[torch.cat(rows).argsort()].unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend_by_length)
