"""Weights as an optimizer moves them: most by less than their rounding, some by more, a few by far."""

from __future__ import annotations

import torch


def drifted(tensor: torch.Tensor, *, share: float = 0.3) -> torch.Tensor:
    """A copy of which `share` of the elements have moved, one in twenty of them to another number altogether."""
    draws = torch.rand(tensor.shape, device=tensor.device)
    small = tensor * (1 + 0.008 * torch.randn(tensor.shape, device=tensor.device).to(tensor.dtype))
    return torch.where(draws < share / 20, -tensor, torch.where(draws < share, small, tensor))
