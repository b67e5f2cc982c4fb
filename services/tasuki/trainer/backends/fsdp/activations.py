"""Activation checkpointing: what layers keep for backward. Everything, attention and inputs, inputs, or inputs in host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tasuki.planner.layout import Checkpointing
from tasuki.trainer.backends.fsdp.attention import attention_operators
from tasuki.trainer.backends.fsdp.boundaries import Boundaries
from tasuki.trainer.backends.fsdp.routing import routing_contexts

Layer = Callable[..., Any]


def set_checkpointing(
    causal_lm: nn.Module, checkpointing: Checkpointing, *, kept_layers: int = 0, boundaries: Boundaries | None = None
) -> None:
    """Sets what each layer keeps from forward to backward. No choice changes results.

    kept_layers: number of last layers that keep everything. boundaries: for OFFLOADED, storage of the layers' inputs.
    """
    decoder: Any = causal_lm.get_submodule("model")
    for index, layer in enumerate(decoder.layers):
        # transformers' layers require these two in training mode.
        is_kept = checkpointing is Checkpointing.NONE or index >= len(decoder.layers) - kept_layers
        layer.gradient_checkpointing = not is_kept
        layer._gradient_checkpointing_func = _checkpoint(checkpointing, index, boundaries, layer)


def _checkpoint(checkpointing: Checkpointing, index: int, boundaries: Boundaries | None, layer: nn.Module) -> Layer:
    kept = attention_operators() if checkpointing is Checkpointing.ATTENTION else ()
    recomputed = recomputing(layer, *kept)
    if checkpointing is Checkpointing.OFFLOADED:
        assert boundaries is not None
        return partial(_offloaded, recomputed, index, boundaries)
    return recomputed


def recomputing(module: nn.Module, *kept: OpOverload) -> Layer:
    """Wraps a function of `module` so that backward recomputes it, except the choice of experts and `kept`."""
    # No module uses random numbers: dropout is off.
    contexts = routing_contexts(module, *kept)
    recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return recomputed if contexts is None else partial(recomputed, context_fn=contexts)


def _offloaded(recomputed: Layer, index: int, boundaries: Boundaries, layer: Layer, *args: Any) -> Any:
    """Saved-tensor hooks around a checkpointed layer see only its input and an empty tensor of torch's; the rest is recomputed."""

    def store(tensor: Tensor) -> int | Tensor:
        if not tensor.numel():
            return tensor
        boundaries.store(index, tensor)
        return index

    def load(stored: int | Tensor) -> Tensor:
        return boundaries.load(stored) if isinstance(stored, int) else stored

    with saved_tensors_hooks(store, load):
        return recomputed(layer, *args)
