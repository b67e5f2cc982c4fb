"""Activation checkpointing: what layers keep for backward. Everything, attention and inputs, inputs, or the former in host memory."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tasuki.planner.node import Checkpointing
from tasuki.trainer.attention.packed import attention_operators
from tasuki.trainer.backends.fsdp.memory import HostActivations
from tasuki.trainer.modules.pointwise import GatedMlp
from tasuki.trainer.modules.recompute import Layer, recomputing
from tasuki.trainer.modules.routing import Router

_TOKENS_DIM = 1


def set_checkpointing(
    causal_lm: nn.Module, checkpointing: Checkpointing, *, kept_layers: int = 0, on_host: HostActivations | None = None
) -> None:
    """Sets what each layer keeps from forward to backward. No choice changes results.

    kept_layers: number of last layers that keep everything; all with NONE, which also keeps what an MLP can recompute at little cost.
    on_host: for OFFLOADED, storage of the other layers' tensors, if there are any.
    """
    decoder: Any = causal_lm.get_submodule("model")
    for index, layer in enumerate(decoder.layers):
        # transformers' layers require the first in training mode, and the second if it is true.
        is_kept = checkpointing is Checkpointing.NONE or index >= len(decoder.layers) - kept_layers
        layer.gradient_checkpointing = not is_kept
        if not is_kept:
            layer._gradient_checkpointing_func = _checkpoint(checkpointing, index, on_host, layer)
        if isinstance(layer.mlp, GatedMlp):
            layer.mlp.keeps_product = checkpointing is Checkpointing.NONE


def _checkpoint(checkpointing: Checkpointing, index: int, on_host: HostActivations | None, layer: nn.Module) -> Layer:
    if checkpointing is Checkpointing.OFFLOADED:
        assert on_host is not None
        recomputed = recomputing(layer, attention_operators(), results=partial(_InHostMemory, on_host, index))
        return partial(_offloaded, recomputed, index, on_host)
    return recomputing(layer, attention_operators() if checkpointing is Checkpointing.ATTENTION else ())


class _InHostMemory:
    """Implements Results for one layer."""

    def __init__(self, on_host: HostActivations, layer: int) -> None:
        self._on_host, self._layer = on_host, layer
        self._places: deque[tuple[int, int]] = deque()

    def append(self, tensors: Sequence[Tensor], /) -> None:
        self._places.append((self._on_host.store(self._layer, tensors), len(tensors)))

    def popleft(self) -> Sequence[Tensor]:
        first, count = self._places.popleft()
        return [self._on_host.load(self._layer, index) for index in range(first, first + count)]


def _offloaded(recomputed: Layer, index: int, on_host: HostActivations, layer: Layer, *args: Any) -> Any:
    """Saved-tensor hooks around a checkpointed layer see only its input and an empty tensor of torch's; the rest is recomputed."""
    if not torch.is_grad_enabled():
        return layer(*args)

    def store(tensor: Tensor) -> int | Tensor:
        return on_host.store(index, [tensor]) if tensor.numel() else tensor

    def load(stored: int | Tensor) -> Tensor:
        return on_host.load(index, stored) if isinstance(stored, int) else stored

    on_host.begin(index)
    with saved_tensors_hooks(store, load):
        return recomputed(layer, *args)


def tile_mlps(causal_lm: torch.nn.Module, *, num_tokens: int) -> None:
    """Limits every layer's MLP to `num_tokens` tokens at a time. Gradients of its weights are summed over tiles in compute dtype."""
    decoder: Any = causal_lm.get_submodule("model")
    for layer in decoder.layers:
        layer.mlp.forward = partial(_tiled, partial(_at, layer.mlp.forward, layer.mlp), recomputing(layer.mlp), num_tokens)


def _at(forward: Callable[[Tensor], Tensor], mlp: nn.Module, first_token: int, hidden_states: Tensor) -> Tensor:
    for module in mlp.modules():
        if isinstance(module, Router):
            module.first_token = first_token
    return forward(hidden_states)


@torch.compiler.disable
def _tiled(forward: Callable[[int, Tensor], Any], recomputed: Layer, num_tokens: int, hidden_states: Tensor) -> Any:
    """hidden_states and result: [1, T, H]."""
    if hidden_states.shape[_TOKENS_DIM] <= num_tokens:
        return forward(0, hidden_states)
    tiles = hidden_states.split(num_tokens, dim=_TOKENS_DIM)
    outs = [recomputed(forward, index * num_tokens, tile) for index, tile in enumerate(tiles)]
    if isinstance(outs[0], tuple):  # gpt-oss's also returns the router's scores, which its layer ignores
        return torch.cat([out for out, _ in outs], dim=_TOKENS_DIM), None
    return torch.cat(outs, dim=_TOKENS_DIM)
