"""Attention over packed sequences, as a model of transformers calls it: one row of all tokens, and no mask.

Shape suffixes: S sequences, T their tokens, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from tasuki.models.family import Attention
from tasuki.trainer.data.micro_batch import TokenBatch

IMPLEMENTATION = "tasuki_packed"
"""transformers' name for it. It makes no mask for an implementation whose masks it does not know."""


class Sequences(Protocol):
    """The sequences of a micro-batch, as a kernel takes them."""

    def attend(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """[T, H, D]: each token over those before it in its sequence, itself among them. See Attention for the settings."""
        ...


Kernel = Callable[[TokenBatch], Sequences]


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention:
    """Attention of a network's layers over one micro-batch. transformers passes it on to each layer."""

    sequences: Sequences
    attention: Attention
    """What the family says: the same numbers that transformers gives each call, under names that differ between its families."""

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, layer: int) -> Tensor:
        """[T, H, D]."""
        return self.sequences.attend(
            q_THD,
            k_TKD,
            v_TKD,
            scale=self.attention.query_scale,
            window=self.attention.windows[layer],
            softcap=self.attention.logit_softcap,
        )


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: None, *, layer_attention: LayerAttention, **_: Any
) -> tuple[Tensor, None]:
    """Answers transformers' call. query: [1, H, T, D], key and value [1, K, T, D], rotated. Returns [1, T, H, D]."""
    q_THD, k_TKD, v_TKD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    layer: Any = module.layer_idx
    return layer_attention(q_THD, k_TKD, v_TKD, layer=layer).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attend)
