"""Blocks of shared-prompt attention in plain torch, for any device and dtype, with windows and capped logits.

Shape suffixes: B blocks of one size, H query heads, K key heads, L queries, M keys, D head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tasuki.trainer.attention.padded import PRODUCTS_UP_TO, PaddedSequences
from tasuki.trainer.attention.shared import Gradients, Settings
from tasuki.trainer.data.micro_batch import SharedPrompts

# Maximum logits computed at a time, in elements: 256 MiB in float32.
_MAX_LOGITS = 1 << 26
_ATEN = torch.ops.aten


class Seen(NamedTuple):
    """The keys visible to queries: up to the query's own position if `is_causal`, otherwise all not hidden by `mask` [L, M]."""

    mask: Tensor | None
    is_causal: bool

    def rows(self, rows: slice, q: Tensor, k: Tensor) -> Tensor | None:
        """The mask of some queries."""
        if not self.is_causal:
            return None if self.mask is None else self.mask[rows]
        places = torch.arange(q.shape[2], device=q.device)[rows]
        return places.unsqueeze(1) >= torch.arange(k.shape[2], device=k.device)


@dataclass(frozen=True, slots=True, eq=False)
class OwnBlocks:
    """Attention of every sequence over itself, padded as PaddedSequences."""

    padded: PaddedSequences

    @classmethod
    def of(cls, cu_seqlens_S: Tensor, max_seqlen: int) -> "OwnBlocks":
        """cu_seqlens_S, max_seqlen: of a TokenBatch."""
        return cls(PaddedSequences.of(cu_seqlens_S, max_seqlen))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
        """See attention_shared.Blocks."""
        places = self.padded.places_T
        parts = [_forward(*block, seen=_causal(block[0], settings), settings=settings) for block in self._blocks(q, k, v)]
        out = torch.cat([_rows(out) for out, _ in parts])
        lse = torch.cat([_rows(lse) for _, lse in parts])
        return out.index_select(0, places), lse.index_select(0, places).T

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: Settings
    ) -> Gradients:
        """See attention_shared.Blocks."""
        padded = self.padded
        # Positions without a token have no gradient, so they contribute none.
        grad_P = grad.new_zeros(len(padded.rows_P), *grad.shape[1:]).index_copy_(0, padded.places_T, grad)
        blocks = zip(self._split(grad_P), self._blocks(q, k, v, out, lse.T), strict=True)
        parts = [_backward(g, *block, seen=_causal(g, settings), settings=settings) for g, block in blocks]
        dq, dk, dv = (torch.cat([_rows(x) for x in each]).index_select(0, padded.places_T) for each in zip(*parts, strict=True))
        return dq, dk, dv

    def _blocks(self, *tensors_T: Tensor) -> Iterator[Any]:
        """Yields [B, H, L, ...] of each tensor, for each group."""
        return zip(*(self._split(x.index_select(0, self.padded.rows_P)) for x in tensors_T), strict=True)

    def _split(self, x_P: Tensor) -> Iterator[Tensor]:
        groups = self.padded.groups
        for part, (num, length) in zip(x_P.split([num * length for num, length in groups]), groups, strict=True):
            yield part.unflatten(0, (num, length)).transpose(1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class PromptBlocks:
    """Attention of continuations over their prompt."""

    prompts: SharedPrompts

    def forward(self, q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
        """See attention_shared.Blocks."""
        parts = [_forward(*block, seen=seen, settings=settings) for block, seen in self._blocks((q,), k, v, settings=settings)]
        return torch.cat([_rows(out) for out, _ in parts]), torch.cat([_rows(lse) for _, lse in parts]).T

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: Settings
    ) -> Gradients:
        """See attention_shared.Blocks."""
        parts = [
            _backward(g, q, k, v, out, lse, seen, settings)
            for (g, q, out, lse, k, v), seen in self._blocks((grad, q, out, lse.T), k, v, settings=settings)
        ]
        dq, dk, dv = (torch.cat([_rows(x) for x in each]) for each in zip(*parts, strict=True))
        return dq, dk, dv

    def _blocks(self, queries: tuple[Tensor, ...], k: Tensor, v: Tensor, *, settings: Settings) -> Iterator[tuple[Any, Seen]]:
        prompts = self.prompts
        split = [x.split(prompts.num_suffix) for x in (*queries, prompts.positions_X)]
        split += [x.split(prompts.num_prefix) for x in (k, v)]
        for *rows, positions, keys, values in zip(*split, strict=True):
            mask = None
            if settings.window is not None:
                behind = positions.unsqueeze(1) - torch.arange(len(keys), device=positions.device)
                mask = behind < settings.window
            yield tuple(x.unsqueeze(0).transpose(1, 2) for x in (*rows, keys, values)), Seen(mask, is_causal=False)


def _rows(x_BHL: Tensor) -> Tensor:
    """[B * L, H, ...]."""
    return x_BHL.transpose(1, 2).flatten(0, 1)


def _causal(x_BHLD: Tensor, settings: Settings) -> Seen:
    length, window = x_BHLD.shape[2], settings.window
    if window is None or window >= length:
        return Seen(None, is_causal=True)
    return Seen(torch.ones(length, length, dtype=torch.bool, device=x_BHLD.device).tril().triu(1 - window), is_causal=False)


def _forward(q: Tensor, k: Tensor, v: Tensor, seen: Seen, settings: Settings) -> tuple[Tensor, Tensor]:
    """[B, H, L, D] and [B, H, L] of q [B, H, L, D], k and v [B, K, M, D]."""
    if _has_kernel(q, seen, settings):
        return _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, seen.is_causal, scale=settings.scale)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for rows in _row_chunks(q, k):
        logits = _logits(q[:, :, rows], k, seen.rows(rows, q, k), settings)
        lse = torch.logsumexp(logits, dim=-1)
        outs.append(_by_key_head(_weights(logits, lse).to(v.dtype), v) @ v.unsqueeze(2))
        lses.append(lse)
    out = torch.cat([part.flatten(1, 2) for part in outs], dim=2)
    return out, torch.cat(lses, dim=2)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen, settings: Settings
) -> Gradients:
    """Gradients of _forward's arguments, given out and lse over all keys that q sees."""
    if _has_kernel(q, seen, settings):
        operands = (x.contiguous() for x in (grad, q, k, v, out, lse))
        return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(*operands, 0.0, seen.is_causal, scale=settings.scale)
    delta = (grad.float() * out.float()).sum(-1, keepdim=True)
    dq, dk, dv = [], torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    for rows in _row_chunks(q, k):
        logits = _logits(q[:, :, rows], k, seen.rows(rows, q, k), settings)
        weights = _weights(logits, lse[:, :, rows])
        grad_rows = _by_key_head(grad[:, :, rows], v)
        dv += (_by_key_head(weights.to(v.dtype), v).transpose(-1, -2) @ grad_rows).sum(2)
        dlogits = weights * ((grad_rows @ v.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) - delta[:, :, rows])
        if settings.softcap is not None:
            dlogits *= torch.where(weights > 0, 1 - (logits / settings.softcap).square(), 0.0)
        dlogits = _by_key_head((dlogits * settings.scale).to(q.dtype), k)
        dq.append((dlogits @ k.unsqueeze(2)).flatten(1, 2))
        dk += (dlogits.transpose(-1, -2) @ _by_key_head(q[:, :, rows], k)).sum(2)
    return torch.cat(dq, dim=2), dk.to(k.dtype), dv.to(v.dtype)


def _has_kernel(q: Tensor, seen: Seen, settings: Settings) -> bool:
    is_long = q.shape[2] > PRODUCTS_UP_TO["cpu"]
    return q.device.type == "cpu" and is_long and settings.softcap is None and seen.mask is None


def _row_chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    num_rows = max(1, _MAX_LOGITS // (q.shape[0] * q.shape[1] * k.shape[2]))
    return (slice(first, first + num_rows) for first in range(0, q.shape[2], num_rows))


def _logits(q: Tensor, k: Tensor, seen: Tensor | None, settings: Settings) -> Tensor:
    """[B, H, L, M] float32; -inf where a query does not see a key."""
    logits = (_by_key_head(q, k) @ k.unsqueeze(2).transpose(-1, -2)).flatten(1, 2).float() * settings.scale
    if settings.softcap is not None:
        logits = torch.tanh(logits / settings.softcap) * settings.softcap
    return logits if seen is None else logits.masked_fill_(~seen, -torch.inf)


def _weights(logits: Tensor, lse: Tensor) -> Tensor:
    """Returns 0 for a query that sees no key: its log-sum is -inf."""
    return (logits - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1)).exp_()


def _by_key_head(x_BHL: Tensor, k: Tensor) -> Tensor:
    """[B, K, G, L, ...]: groups query heads by their key head."""
    return x_BHL.unflatten(1, (k.shape[1], -1))
