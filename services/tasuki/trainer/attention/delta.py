"""Gated delta rule over packed sequences: each starts from an empty state, which transformers' own functions carry over on a CPU.

Shape suffixes: S sequences, T their tokens, C channels, W tokens that a convolution sees, H heads, K and V sizes of keys and values.
Source: Gated Delta Networks (arXiv:2412.06464).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

_CHUNK = 64
"""Tokens that transformers' function computes at once, to a multiple of which it pads."""


class DeltaSequences(Protocol):
    """The sequences of a micro-batch, for a layer's convolution and recurrence."""

    def convolve(self, x_TC: Tensor, weight_CW: Tensor) -> Tensor:
        """[T, C]: SiLU of each channel's causal convolution within each sequence."""
        ...

    def recur(self, q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, *, decay_TH: Tensor, beta_TH: Tensor) -> Tensor:
        """[T, H, V]. decay_TH: logarithm of what a state keeps, float32. Scales q by 1 / sqrt(K), and q and k to length 1."""
        ...


DeltaKernel = Callable[[Tensor], DeltaSequences]
"""cu_seqlens [S + 1] int32 of a TokenBatch -> its sequences."""


@dataclass(slots=True, eq=False)
class PlainDelta:
    """In torch: sequences of as many chunks are padded and computed together."""

    cu_seqlens_S: Tensor

    def convolve(self, x_TC: Tensor, weight_CW: Tensor) -> Tensor:
        lengths_S, (num_channels, width) = self.cu_seqlens_S.diff(), weight_CW.shape
        # Each sequence follows zeros, as if it were alone.
        gaps_T = torch.arange(len(lengths_S), device=x_TC.device).repeat_interleave(lengths_S, output_size=len(x_TC)) * (
            width - 1
        )
        first_T = torch.arange(len(x_TC), device=x_TC.device) + gaps_T
        padded = x_TC.new_zeros(len(x_TC) + len(lengths_S) * (width - 1), num_channels)
        padded = padded.index_put((first_T + width - 1,), x_TC)
        out = conv1d(padded.T.unsqueeze(0), weight_CW.unsqueeze(1), groups=num_channels).squeeze(0).T
        return silu(out.index_select(0, first_T))

    def recur(self, q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, *, decay_TH: Tensor, beta_TH: Tensor) -> Tensor:
        bounds, device = self.cu_seqlens_S.tolist(), v_THV.device
        by_chunks = sorted((-(-(end - first) // _CHUNK), first, end) for first, end in pairwise(bounds))
        rows, outs = list[Tensor](), list[Tensor]()
        for num_chunks, group in groupby(by_chunks, key=lambda sequence: sequence[0]):
            runs, padded = [(first, end) for _, first, end in group], num_chunks * _CHUNK
            rows_T = torch.cat([torch.arange(first, end, device=device) for first, end in runs])
            starts = (torch.arange(end - first, device=device) + at * padded for at, (first, end) in enumerate(runs))
            places_T = torch.cat(list(starts))
            q, k, v, g, beta = (
                x.new_zeros(len(runs) * padded, *x.shape[1:])
                .index_put((places_T,), x.index_select(0, rows_T))
                .unflatten(0, (len(runs), padded))
                for x in (q_THK, k_THK, v_THV, decay_TH, beta_TH)
            )
            rows.append(rows_T)
            outs.append(_Recomputed.apply(q, k, v, g, beta).flatten(0, 1).index_select(0, places_T))
        return torch.cat(outs).index_select(0, torch.cat(rows).argsort())


class _Recomputed(torch.autograd.Function):
    """Keeps its inputs alone: transformers' function keeps a hundred times as much."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return _plain(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            return torch.autograd.grad(_plain(*leaves), leaves, grad)


def _plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


@dataclass(slots=True, eq=False)
class FlaDelta:
    """By flash-linear-attention, on a GPU."""

    cu_seqlens_S: Tensor

    def convolve(self, x_TC: Tensor, weight_CW: Tensor) -> Tensor:
        from fla.modules.causal_conv1d import causal_conv1d  # pyright: ignore[reportMissingImports]

        out, _ = causal_conv1d(x_TC.unsqueeze(0), weight_CW, activation="silu", cu_seqlens=self.cu_seqlens_S.long())
        return out.squeeze(0)

    def recur(self, q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, *, decay_TH: Tensor, beta_TH: Tensor) -> Tensor:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

        q, k, v, g, beta = (x.contiguous().unsqueeze(0) for x in (q_THK, k_THK, v_THV, decay_TH, beta_TH))
        cu_seqlens_S = self.cu_seqlens_S.long()
        out, _ = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens_S)
        return out.squeeze(0)
