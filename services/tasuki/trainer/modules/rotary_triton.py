"""Triton kernel of rotary position embeddings: one pass over memory. Arithmetic in float32."""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# Triton compiles this function; annotations mark constants.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 8


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, is_back: bool) -> Tensor:
    """[T, H, D]: rotates each head by its token's angles, or back. All contiguous; both halves of cosines and sines are equal."""
    out_THD = torch.empty_like(x_THD)
    num_tokens, num_heads, head_dim = x_THD.shape
    half = head_dim // 2
    _rotate[num_tokens, triton.cdiv(num_heads, _HEADS)](
        x_THD, cos_TD.contiguous(), sin_TD.contiguous(), out_THD, num_heads, half, is_back, _HEADS, triton.next_power_of_2(half)
    )
    return out_THD


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, num_heads, half, is_back: tl.constexpr, heads: tl.constexpr, columns: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)[:, None]
    column = tl.arange(0, columns)[None, :]
    inside = (head < num_heads) & (column < half)
    cos = tl.load(cos_ptr + token * 2 * half + column, mask=column < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * 2 * half + column, mask=column < half, other=0.0).to(tl.float32)
    if is_back:
        sin = -sin
    place = (token * num_heads + head) * 2 * half + column
    first = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + place + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + place + half, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=inside)
