"""Checks a model's module against its family: every parameter and buffer must be accounted for. Also initializes buffers."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from tasuki.models.family import Model
from tasuki.wire.errors import UnsupportedModel


def check_module(causal_lm: PreTrainedModel, model: Model) -> None:
    """Raises UnsupportedModel naming a parameter or buffer that only one of the two has, or whose shapes differ.

    causal_lm: as created by transformers, without adapters, possibly on the meta device.
    """
    found = {name: tuple(param.shape) for name, param in causal_lm.named_parameters()}
    described = model.shape.parameters()
    for name in sorted(found.keys() | described.keys()):
        if found.get(name) != described.get(name):
            raise _unaccounted(causal_lm, f"parameter {name}", _shape(found, name), _shape(described, name))
    buffers, known = {name for name, _ in causal_lm.named_buffers()}, model.buffers()
    for name in sorted(buffers ^ known):
        raise _unaccounted(causal_lm, f"buffer {name}", _presence(name in buffers), _presence(name in known))


def set_buffers(causal_lm: PreTrainedModel, model: Model, *, device: torch.device) -> None:
    """Initializes every buffer. Values follow from the configuration and are in no checkpoint. Call it after `to_empty`."""
    decoder = cast(Any, causal_lm).model
    with torch.device(device):
        decoder.rotary_emb = type(decoder.rotary_emb)(config=causal_lm.config)
    for name, value in model.constant_buffers.items():
        module_name, _, buffer_name = name.rpartition(".")
        module = causal_lm.get_submodule(module_name)
        module.register_buffer(buffer_name, torch.tensor(value, device=device), persistent=False)


def _unaccounted(causal_lm: nn.Module, what: str, found: str, described: str) -> UnsupportedModel:
    architecture = type(causal_lm).__name__
    return UnsupportedModel(
        f"{architecture}: {what} is {found} in transformers and {described} in tasuki.models", architecture=architecture
    )


def _shape(shapes: dict[str, tuple[int, ...]], name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "absent"


def _presence(is_there: bool) -> str:
    return "there" if is_there else "absent"
