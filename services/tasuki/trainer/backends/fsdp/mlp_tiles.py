"""MLPs computed over some tokens at a time, and again in backward: what is inside one exists of those tokens only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_TOKENS_DIM = 1


def tile_mlps(causal_lm: torch.nn.Module, *, num_tokens: int) -> None:
    """Has every layer's MLP take at most `num_tokens` tokens at a time. Gradients of its weights are sums over tiles, in compute dtype."""
    decoder: Any = causal_lm.get_submodule("model")
    for layer in decoder.layers:
        layer.mlp.forward = partial(_tiled, layer.mlp.forward, num_tokens)


def _tiled(forward: Callable[[Tensor], Tensor], num_tokens: int, hidden_states: Tensor) -> Tensor:
    """hidden_states: [1, T, H], as the result."""
    if hidden_states.shape[_TOKENS_DIM] <= num_tokens:
        return forward(hidden_states)
    tiles = hidden_states.split(num_tokens, dim=_TOKENS_DIM)
    # An MLP draws no random numbers.
    parts: list[Any] = [checkpoint(forward, tile, use_reentrant=False, preserve_rng_state=False) for tile in tiles]
    return torch.cat(parts, dim=_TOKENS_DIM)
