"""MLPs computed tile by tile, and recomputed in backward, so that intermediate activations exist for one tile only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tasuki.trainer.backends.fsdp.activations import Layer, recomputing

_TOKENS_DIM = 1


def tile_mlps(causal_lm: torch.nn.Module, *, num_tokens: int) -> None:
    """Limits every layer's MLP to `num_tokens` tokens at a time. Gradients of its weights are summed over tiles in compute dtype."""
    decoder: Any = causal_lm.get_submodule("model")
    for layer in decoder.layers:
        layer.mlp.forward = partial(_tiled, layer.mlp.forward, recomputing(layer.mlp), num_tokens)


@torch.compiler.disable
def _tiled(forward: Callable[[Tensor], Tensor], recomputed: Layer, num_tokens: int, hidden_states: Tensor) -> Tensor:
    """hidden_states and result: [1, T, H]."""
    if hidden_states.shape[_TOKENS_DIM] <= num_tokens:
        return forward(hidden_states)
    tiles = hidden_states.split(num_tokens, dim=_TOKENS_DIM)
    return torch.cat([recomputed(forward, tile) for tile in tiles], dim=_TOKENS_DIM)
