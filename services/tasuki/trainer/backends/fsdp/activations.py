"""What a network keeps of its layers for backward: everything, attention and inputs, inputs, or inputs in host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tasuki.planner.layout import Checkpointing
from tasuki.trainer.backends.fsdp.attention import attention_operators
from tasuki.trainer.backends.fsdp.boundaries import Boundaries

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
        layer._gradient_checkpointing_func = _checkpoint(checkpointing, index, boundaries)


def _checkpoint(checkpointing: Checkpointing, index: int, boundaries: Boundaries | None) -> Layer:
    # A layer draws no random numbers: dropout is off.
    recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if checkpointing is Checkpointing.ATTENTION:
        return partial(recomputed, context_fn=partial(create_selective_checkpoint_contexts, attention_operators()))
    if checkpointing is Checkpointing.OFFLOADED:
        assert boundaries is not None
        return partial(_offloaded, recomputed, index, boundaries)
    return recomputed


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
