"""Attention over packed sequences in plain torch: pads among sequences of similar length. For any device and dtype.

Shape suffixes: T tokens, P padded positions of all groups, H query heads, K key heads, G query heads that share a key head,
D head size; B sequences of a group, L its padded length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Sequences up to this length form one group: another call would cost more than their padding.
_SHORT = 64
# Up to this length matrix products train faster on a CPU than torch's fused attention: in bfloat16 three to ten times at tens of tokens.
PRODUCTS_UP_TO = {"cpu": 256, "cuda": 0}


@dataclass(frozen=True, slots=True, eq=False)
class PaddedSequences:
    """The sequences of a micro-batch in groups, each right-padded to its longest.

    Above _SHORT tokens, lengths within a group differ by at most a factor of two.
    """

    groups: tuple[tuple[int, int], ...]
    """(B, L) of each group."""
    is_padded: bool
    """Whether there is padding or reordering; False if all sequences have the same length."""
    rows_P: Tensor
    """int64: the token at each position; padding repeats the sequence's last token."""
    places_T: Tensor
    """int64: the position of each token."""

    @classmethod
    def of(cls, cu_seqlens_S: Tensor, max_seqlen: int) -> "PaddedSequences":
        """cu_seqlens_S, max_seqlen: of a TokenBatch."""
        # One copy to the host per micro-batch, if these are on a GPU.
        starts_S = cu_seqlens_S.cpu().long()
        lengths_S = starts_S.diff()
        lengths: list[int] = lengths_S.tolist()
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        parts = [list(part) for _, part in groupby(order, key=lambda index: (max(lengths[index], _SHORT) - 1).bit_length())]
        groups = tuple((len(part), lengths[part[0]]) for part in parts)
        rows: list[Tensor] = []
        first_place_S, num_places = torch.empty_like(lengths_S), 0
        for part, (num, length) in zip(parts, groups, strict=True):
            first_place_S[part] = num_places + length * torch.arange(num)
            rows.append(torch.minimum(starts_S[part, None] + torch.arange(length), starts_S[1:][part, None] - 1).flatten())
            num_places += num * length
        places_T = torch.arange(sum(lengths)) + torch.repeat_interleave(first_place_S - starts_S[:-1], lengths_S)
        assert max_seqlen == groups[0][1]
        device = cu_seqlens_S.device
        is_padded = len(groups) > 1 or num_places > sum(lengths)
        return cls(groups, is_padded, torch.cat(rows).to(device), places_T.to(device))

    def attend(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """[T, H, D]: causal attention within each sequence. See tasuki.models.family.Attention."""
        qkv = (q_THD, k_TKD, v_TKD)
        padded = [_Pad.apply(x, self.rows_P, self.places_T) for x in qkv] if self.is_padded else qkv
        parts = [
            _attend(q, k, v, scale=scale, window=window, softcap=softcap)
            for q, k, v in zip(*(self._split(x) for x in padded), strict=True)
        ]
        return _Unpad.apply(torch.cat(parts), self.rows_P, self.places_T) if self.is_padded else parts[0]

    def _split(self, x_PHD: Tensor) -> Iterator[Tensor]:
        """Each group's [B, L, H, D]."""
        for part, (num, length) in zip(x_PHD.split([num * length for num, length in self.groups]), self.groups, strict=True):
            yield part.view(num, length, *part.shape[1:])


def _attend(
    q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, *, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """[B * L, H, D] for one group."""
    num, length, num_heads, head_dim = q_BLHD.shape
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLKD, v_BLKD))
    window = None if window is None or window >= length else window
    if softcap is not None or length <= PRODUCTS_UP_TO[q.device.type]:
        out_BHLD = _products(q, k, v, scale=scale, window=window, softcap=softcap)
    else:
        is_shared = num_heads != k.shape[1]
        if is_shared and q.device.type == "cuda":
            # Some of torch's CUDA kernels do not support shared key heads.
            k, v = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k, v))
            is_shared = False
        mask = None if window is None else _seen(length, window, q.device)
        out_BHLD = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_shared
        )
    return out_BHLD.transpose(1, 2).reshape(num * length, num_heads, head_dim)


def _products(
    q_BHLD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, *, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """[B, H, L, D] by matrix products, with the softmax in float32."""
    num, num_heads, length, head_dim = q_BHLD.shape
    num_keys = k_BKLD.shape[1]
    q_BKGD = q_BHLD.reshape(num, num_keys, -1, head_dim)
    logits = (q_BKGD @ k_BKLD.transpose(2, 3)) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    unseen = ~_seen(length, window, logits.device)
    logits_BHLL = logits.view(num, num_heads, length, length).masked_fill(unseen, -torch.inf)
    weights = torch.softmax(logits_BHLL, dim=-1, dtype=torch.float32).to(v_BKLD.dtype)
    return (weights.view(num, num_keys, -1, length) @ v_BKLD).view(num, num_heads, length, head_dim)


def _seen(length: int, window: int | None, device: torch.device) -> Tensor:
    """[L, L] bool: whether token i may attend to token j."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


class _Pad(torch.autograd.Function):
    """[T, ...] -> [P, ...]. Padding has no gradient: no token attends to it, and it has no output."""

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, rows_P: Tensor, places_T: Tensor) -> Tensor:
        ctx.save_for_backward(places_T)
        return x_T.index_select(0, rows_P)

    @staticmethod
    def backward(ctx: Any, grad_P: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (places_T,) = ctx.saved_tensors
        return grad_P.index_select(0, places_T), None, None


class _Unpad(torch.autograd.Function):
    """[P, ...] -> [T, ...]."""

    @staticmethod
    def forward(ctx: Any, x_P: Tensor, rows_P: Tensor, places_T: Tensor) -> Tensor:
        ctx.save_for_backward(places_T)
        ctx.num_places = len(rows_P)
        return x_P.index_select(0, places_T)

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (places_T,) = ctx.saved_tensors
        grad_P = grad_T.new_zeros(ctx.num_places, *grad_T.shape[1:])
        return grad_P.index_copy_(0, places_T, grad_T), None, None
