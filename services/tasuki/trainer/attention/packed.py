"""Attention over packed sequences for transformers models: one row of all tokens, without a mask.

Shape suffixes: S sequences, T their tokens, H query heads, K key heads, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.functional import pad
from transformers import AttentionInterface

from tasuki.models.family import Attention
from tasuki.trainer.attention.blocks import OwnBlocks, PromptBlocks
from tasuki.trainer.attention.delta import DeltaKernel, DeltaSequences, PlainDelta
from tasuki.trainer.attention.flash import Fa4Blocks, VarlenBlocks, own_runs, prompt_runs
from tasuki.trainer.attention.padded import PaddedSequences
from tasuki.trainer.attention.sequence_parallel import SequenceGroup
from tasuki.trainer.attention.shared import Blocks, SharedSequences
from tasuki.trainer.data.micro_batch import SharedPrompts, TokenBatch

IMPLEMENTATION = "tasuki_packed"
"""Name of this attention in transformers, which creates no mask for an implementation that it does not know."""


class Sequences(Protocol):
    """The sequences of a micro-batch in a kernel's format."""

    def attend(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """[T, H, D]: causal attention within each sequence. See Attention for the settings."""
        ...


AttentionBackend = Literal["fa4", "varlen", "sdpa"]
_OWN: dict[AttentionBackend, Callable[[Tensor, int], Blocks]] = {
    "fa4": lambda *starts: Fa4Blocks(own_runs(*starts)),
    "varlen": lambda *starts: VarlenBlocks(own_runs(*starts)),
    "sdpa": OwnBlocks.of,
}
"""cu_seqlens [S + 1] int32 and the maximum length, both of a TokenBatch -> every sequence over itself."""
_PROMPTS: dict[AttentionBackend, Callable[[SharedPrompts], Blocks]] = {
    "fa4": lambda prompts: Fa4Blocks(prompt_runs(prompts)),
    "varlen": lambda prompts: VarlenBlocks(prompt_runs(prompts)),
    "sdpa": PromptBlocks,
}


def attention_operators() -> list[OpOverload]:
    """Torch operators that compute a layer's whole attention, for every kernel. Excludes plain products for short or capped sequences."""
    aten = torch.ops.aten
    return [
        torch.ops.tasuki.block_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ]


# Not frozen: torch.compile would trace into it and recompile a layer for other lengths of sequences.
@dataclass(slots=True, eq=False)
class LayerAttention:
    """Attention of a network's layers over one micro-batch. transformers passes it to each layer."""

    sequences: Sequences
    attention: Attention
    delta: DeltaSequences | None = None
    """The same sequences for gated delta nets; None where these have no meaning: shared prompts, or ranks that split the tokens."""
    sharing: SequenceGroup | None = None

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, layer: int, sinks_H: Tensor | None = None) -> Tensor:
        """[T, H, D] for this rank's tokens. Values with smaller heads than keys are padded, since not every kernel takes them."""
        own, sharing, value_dim = self.attention, self.sharing, v_TKD.shape[-1]
        if value_dim < k_TKD.shape[-1]:
            v_TKD = pad(v_TKD, (0, k_TKD.shape[-1] - value_dim))
        qkv = (q_THD, k_TKD, v_TKD) if sharing is None else sharing.to_heads(q_THD, k_TKD, v_TKD)
        settings: dict[str, Any] = {"scale": own.query_scale, "window": own.windows[layer], "softcap": own.logit_softcap}
        if sinks_H is not None:
            part = None if sharing is None else sharing.part
            settings["sinks_H"] = sinks_H if part is None else sinks_H.view(part.num_parts, -1)[part.index]
        out = self.sequences.attend(*qkv, **settings)
        out = out if sharing is None else sharing.to_tokens(out)
        # A view of the whole would have compiled layers compiled again.
        return out[..., :value_dim] if value_dim < out.shape[-1] else out


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Attention of a network's layers."""

    backend: AttentionBackend
    attention: Attention
    """Parameters of the family. transformers also passes them with each call, under names that differ between families."""
    sharing: SequenceGroup | None = None
    """Ranks that compute the other parts of each micro-batch."""
    shares_prompts: bool = False
    """Whether a micro-batch may have prompts that samples share."""
    delta: DeltaKernel = PlainDelta

    def over(self, batch: TokenBatch) -> LayerAttention:
        sequences = sequences_of(self.backend, batch, has_sinks=self.attention.has_sinks)
        is_whole = batch.prompts is None and self.sharing is None
        delta = self.delta(batch.cu_seqlens_S) if is_whole else None
        return LayerAttention(sequences, self.attention, delta, self.sharing)

    def gather(self, *scores_N: Tensor, batch: TokenBatch) -> list[Tensor]:
        """Gathers the scores of the completion tokens of all parts, in the order of the samples."""
        scores = list(scores_N) if self.sharing is None else self.sharing.gather(scores_N, counts=batch.num_places)
        return scores if batch.order_N is None else [score_N.index_select(0, batch.order_N) for score_N in scores]


def sequences_of(backend: AttentionBackend, batch: TokenBatch, *, has_sinks: bool = False) -> Sequences:
    """The sequences of a micro-batch, some of which may continue a prompt. has_sinks: whether SharedSequences are needed anyway."""
    starts, prompts = (batch.cu_seqlens_S, batch.max_seqlen), batch.prompts
    if backend == "sdpa" and prompts is None and not has_sinks:
        return PaddedSequences.of(*starts)
    own = _OWN[backend](*starts)
    if prompts is None:
        return SharedSequences(own)
    return SharedSequences(own, _PROMPTS[backend](prompts), prompts.first, sum(prompts.num_prefix), sum(prompts.num_suffix))


@torch.compiler.disable
def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: None,
    *,
    layer_attention: LayerAttention,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Called by transformers. query: [1, H, T, D], key and value [1, K, T, D], rotated. Returns [1, T, H, D], contiguous.

    s_aux: [H] sinks of a family that has them.

    Runs between the graphs of a compiled layer: it depends on the sequences' lengths and may exchange tokens with other ranks.
    """
    q_THD, k_TKD, v_TKD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    layer: Any = module.layer_idx
    return layer_attention(q_THD, k_TKD, v_TKD, layer=layer, sinks_H=s_aux).contiguous().unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attend)
