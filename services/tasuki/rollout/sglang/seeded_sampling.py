"""Sampling with a seed per request, for engines on a CPU: SGLang's own is a Triton kernel."""

from __future__ import annotations

import torch

_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64
_FRACTION_BITS = 53


def multinomial_with_seed(log_probs_BV: torch.Tensor, seed_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """Draws one index per row, determined by the row's distribution, seed and position; replaces SGLang's function.

    log_probs_BV: [B, V], -inf for excluded indices; rows need not sum to 1. Returns [B, 1] int64.
    Method: inverse of the cumulative distribution at a hash of (seed, position).
    """
    cumulative_BV = log_probs_BV.double().exp().cumsum(dim=-1)
    total_B1 = cumulative_BV[:, -1:].contiguous()
    target_B1 = _uniform(seed_B, positions_B).unsqueeze(1) * total_B1
    index_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
    # Rounding at the upper end could step past the last index with a probability.
    last_B1 = torch.searchsorted(cumulative_BV, total_B1)
    # With NaN logits nothing is found. Any index will do: its log-prob is NaN too, and the service refuses the sample.
    return torch.minimum(index_B1, last_B1).clamp_max(log_probs_BV.shape[-1] - 1)


def _uniform(seed_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """[B] float64 in [0, 1), by splitmix64 over seed and position."""
    mixed = _mix(_mix(seed_B.to(torch.int64)) + positions_B.to(torch.int64) * _STEP)
    bits = (mixed >> (64 - _FRACTION_BITS)) & ((1 << _FRACTION_BITS) - 1)
    return bits.double() / (1 << _FRACTION_BITS)


def _mix(words: torch.Tensor) -> torch.Tensor:
    words = (words + _STEP) * _MIX
    words = (words ^ ((words >> 31) & ((1 << 33) - 1))) * _STEP
    return words ^ ((words >> 29) & ((1 << 35) - 1))
