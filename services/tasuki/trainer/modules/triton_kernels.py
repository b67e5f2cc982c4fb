"""Triton kernels of gated MLPs: activation(gate) * up and its gradients, one pass over memory each. Arithmetic in float32."""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# Triton compiles these functions; annotations mark constants.

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 2048


def gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """[..., I] contiguous. gate, up: equal shape and dtype; contiguous last dimension, uniform row stride."""
    gate_RI, up_RI = _rows(gate), _rows(up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    num_rows, width = gate_RI.shape
    _forward[num_rows, triton.cdiv(width, _COLUMNS)](
        gate_RI, up_RI, out, gate_RI.stride(0), up_RI.stride(0), width, activation == "silu", _COLUMNS
    )
    return out


def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str, *, with_product: bool = False) -> None:
    """Writes the gradients of gate and up in their place and, with_product, activation(gate) * up in that of grad. grad: contiguous."""
    gate_RI, up_RI = _rows(gate), _rows(up)
    num_rows, width = gate_RI.shape
    _backward[num_rows, triton.cdiv(width, _COLUMNS)](
        grad, gate_RI, up_RI, gate_RI.stride(0), up_RI.stride(0), width, activation == "silu", with_product, _COLUMNS
    )


def _rows(x: Tensor) -> Tensor:
    """[R, I] view; the rows of half a fused projection are twice as far apart."""
    return x.view(-1, x.shape[-1])


@triton.jit
def _activated(gate, is_silu: tl.constexpr):
    """activation(gate) and its derivative."""
    if is_silu:
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        return gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid))
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    tanh = 2.0 / (1.0 + tl.exp(-2.0 * inner)) - 1.0
    slope = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * gate * gate)
    return 0.5 * gate * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * gate * (1.0 - tanh * tanh) * slope


@triton.jit
def _forward(gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, width, is_silu: tl.constexpr, columns: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    activated, _ = _activated(gate, is_silu)
    tl.store(out_ptr + row * width + column, (activated * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad_ptr,
    gate_ptr,
    up_ptr,
    gate_stride,
    up_stride,
    width,
    is_silu: tl.constexpr,
    with_product: tl.constexpr,
    columns: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < width
    grads, gates, ups = (
        grad_ptr + row * width + column,
        gate_ptr + row * gate_stride + column,
        up_ptr + row * up_stride + column,
    )
    grad = tl.load(grads, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups, mask=inside, other=0.0).to(tl.float32)
    activated, slope = _activated(gate, is_silu)
    tl.store(gates, (grad * up * slope).to(gate_ptr.dtype.element_ty), mask=inside)
    tl.store(ups, (grad * activated).to(up_ptr.dtype.element_ty), mask=inside)
    if with_product:
        tl.store(grads, (activated * up).to(grad_ptr.dtype.element_ty), mask=inside)


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
