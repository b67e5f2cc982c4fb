"""Layers compiled by torch, each by itself. Attention stays outside: its sequences differ in every micro-batch."""

from __future__ import annotations

from typing import Any

import torch


def compile_layers(causal_lm: torch.nn.Module, *, backend: str = "inductor") -> None:
    """Compiles every layer's forward and backward at its first use, for any number of tokens.

    Layers are of one or two kinds, so the first of each kind is compiled and the others take its code. Call it before FSDP2 shards.
    """
    decoder: Any = causal_lm.get_submodule("model")
    for layer in decoder.layers:
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=True)
