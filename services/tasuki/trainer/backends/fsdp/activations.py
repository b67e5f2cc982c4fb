"""What a network keeps of its layers for backward: everything, attention and inputs, inputs, or inputs in host memory."""

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
    """Decides what each layer keeps from forward to backward. No choice changes what is computed.

    kept_layers: the last ones keep everything. boundaries: for OFFLOADED, where inputs of layers are meanwhile; of as many layers.
    """
    decoder: Any = causal_lm.get_submodule("model")
    for index, layer in enumerate(decoder.layers):
        # transformers' layers ask for these two in training.
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
    """A function that computes what it is given, which is of `module`, and again in backward, but for the choice of experts and `kept`."""
    # No module draws random numbers: dropout is off.
    contexts = routing_contexts(module, *kept)
    recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return recomputed if contexts is None else partial(recomputed, context_fn=contexts)


def _offloaded(recomputed: Layer, index: int, boundaries: Boundaries, layer: Layer, *args: Any) -> Any:
    """Hooks around a checkpointed layer see its input alone, and an empty tensor of torch's; what is inside is recomputed."""

    def store(tensor: Tensor) -> int | Tensor:
        if not tensor.numel():
            return tensor
        boundaries.store(index, tensor)
        return index

    def load(stored: int | Tensor) -> Tensor:
        return boundaries.load(stored) if isinstance(stored, int) else stored

    with saved_tensors_hooks(store, load):
        return recomputed(layer, *args)
