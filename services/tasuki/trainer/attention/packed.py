"""Attention over packed sequences for transformers models: one row of all tokens, without a mask.

Shape suffixes: S sequences, T their tokens, H query heads, K key heads, D head size.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from transformers import AttentionInterface

from tasuki.models.family import Attention
from tasuki.models.shape import ModelShape
from tasuki.trainer.attention.blocks import OwnBlocks, PromptBlocks
from tasuki.trainer.attention.flash import HEAD_DIM_STEP, MAX_HEAD_DIM, Fa4Sequences, VarlenSequences
from tasuki.trainer.attention.flash_blocks import Fa4Blocks, Runs, VarlenBlocks, flash_runs
from tasuki.trainer.attention.padded import PaddedSequences
from tasuki.trainer.attention.sequence_parallel import SequenceGroup
from tasuki.trainer.attention.shared import Blocks, SharedSequences
from tasuki.trainer.data.micro_batch import SharedPrompts, TokenBatch
from tasuki.wire.errors import InvalidArgument

_log = logging.getLogger("tasuki.trainer")
IMPLEMENTATION = "tasuki_packed"
"""Name of this attention in transformers, which creates no mask for an implementation that it does not know."""


class Sequences(Protocol):
    """The sequences of a micro-batch in a kernel's format."""

    def attend(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """[T, H, D]: causal attention within each sequence. See Attention for the settings."""
        ...


Kernel = Callable[[Tensor, int], Sequences]
"""cu_seqlens [S + 1] int32 and the maximum length, both of a TokenBatch -> its sequences."""
AttentionBackend = Literal["fa4", "varlen", "sdpa"]
_KERNELS: dict[AttentionBackend, Kernel] = {"fa4": Fa4Sequences, "varlen": VarlenSequences, "sdpa": PaddedSequences.of}


def _flash_blocks(kind: Callable[[Runs], Blocks], batch: TokenBatch, prompts: SharedPrompts) -> tuple[Blocks, Blocks]:
    own, shared = flash_runs(batch, prompts)
    return kind(own), kind(shared)


_BLOCKS: dict[Kernel, Callable[[TokenBatch, SharedPrompts], tuple[Blocks, Blocks]]] = {
    Fa4Sequences: functools.partial(_flash_blocks, Fa4Blocks),
    VarlenSequences: functools.partial(_flash_blocks, VarlenBlocks),
    PaddedSequences.of: lambda batch, prompts: (OwnBlocks.of(batch), PromptBlocks(prompts)),
}
# In bfloat16, a kernel's output and gradients differ from float32's by less than 0.01 in norm.
TOLERANCE = 0.02
# Lengths of the trial sequences: around tiles of 64 and 128 tokens, and a single token.
_LENGTHS = (1, 127, 129, 64, 300)
_SHORT_WINDOW = 100


def attention_operators() -> list[OpOverload]:
    """Torch operators that compute a layer's whole attention, for every kernel. Excludes plain products for short or capped sequences."""
    aten = torch.ops.aten
    return [
        torch.ops.tasuki.packed_attention.default,
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
    sharing: SequenceGroup | None = None

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, layer: int) -> Tensor:
        """[T, H, D] for this rank's tokens."""
        own, sharing = self.attention, self.sharing
        qkv = (q_THD, k_TKD, v_TKD) if sharing is None else sharing.to_heads(q_THD, k_TKD, v_TKD)
        out = self.sequences.attend(*qkv, scale=own.query_scale, window=own.windows[layer], softcap=own.logit_softcap)
        return out if sharing is None else sharing.to_tokens(out)


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Attention of a network's layers."""

    kernel: Kernel
    attention: Attention
    """Parameters of the family. transformers also passes them with each call, under names that differ between families."""
    sharing: SequenceGroup | None = None
    """Ranks that compute the other parts of each micro-batch."""
    shares_prompts: bool = False
    """Whether a micro-batch may have prompts that samples share."""

    def over(self, batch: TokenBatch) -> LayerAttention:
        return LayerAttention(sequences_of(self.kernel, batch), self.attention, self.sharing)

    def gather(self, *scores_N: Tensor, batch: TokenBatch) -> list[Tensor]:
        """Gathers the scores of the completion tokens of all parts, in the order of the samples."""
        scores = list(scores_N) if self.sharing is None else self.sharing.gather(scores_N, counts=batch.num_places)
        return scores if batch.order_N is None else [score_N.index_select(0, batch.order_N) for score_N in scores]


def sequences_of(kernel: Kernel, batch: TokenBatch) -> Sequences:
    """The sequences of a micro-batch, some of which may continue a prompt."""
    if batch.prompts is None:
        return kernel(batch.cu_seqlens_S, batch.max_seqlen)
    own, prompts = _BLOCKS[kernel](batch, batch.prompts)
    num_prefix, num_suffix = sum(batch.prompts.num_prefix), sum(batch.prompts.num_suffix)
    return SharedSequences(own, prompts, batch.prompts.first, num_prefix, num_suffix)


@torch.compiler.disable
def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: None, *, layer_attention: LayerAttention, **_: Any
) -> tuple[Tensor, None]:
    """Called by transformers. query: [1, H, T, D], key and value [1, K, T, D], rotated. Returns [1, T, H, D], contiguous.

    Runs between the graphs of a compiled layer: it depends on the sequences' lengths and may exchange tokens with other ranks.
    """
    q_THD, k_TKD, v_TKD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    layer: Any = module.layer_idx
    return layer_attention(q_THD, k_TKD, v_TKD, layer=layer).contiguous().unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attend)


@functools.cache
def choose_kernel(
    wanted: AttentionBackend | Literal["auto"],
    *,
    shape: ModelShape,
    attention: Attention,
    dtype: torch.dtype,
    device: torch.device,
) -> Kernel:
    """Chooses a network's kernel by trial on this device: `wanted`, or for "auto" the first correct one of fa4, varlen and sdpa.

    Logs the choice and reasons once. Raises InvalidArgument if `wanted` cannot compute the model.
    """
    candidates: list[AttentionBackend] = ["fa4", "varlen", "sdpa"] if wanted == "auto" else [wanted]
    for backend in candidates:
        started = time.monotonic()
        problem = None
        if backend != "sdpa":
            problem = _unsupported(shape, attention, dtype=dtype, device=device)
            problem = problem or _fault(_KERNELS[backend], shape, attention, dtype=dtype, device=device)
        if problem is None:
            seconds = time.monotonic() - started
            _log.info("event=attention backend=%s architecture=%s seconds=%.1f", backend, shape.architecture, seconds)
            return _KERNELS[backend]
        if wanted != "auto":
            raise InvalidArgument("trainer.attention_backend", f'"{wanted}" is not possible here: {problem}')
        if device.type == "cuda":
            _log.warning("event=attention_unusable backend=%s architecture=%s cause=%a", backend, shape.architecture, problem)
    raise AssertionError("sdpa supports every model")


def _unsupported(shape: ModelShape, attention: Attention, *, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why FlashAttention's kernels do not support a model."""
    if device.type != "cuda":
        return 'it needs device = "cuda"'
    if dtype != torch.bfloat16:
        return 'it needs trainer.compute_dtype = "bfloat16"'
    if attention.logit_softcap is not None:
        return f"its backward pass cannot cap logits, which {shape.architecture} does at {attention.logit_softcap:g}"
    if shape.head_dim % HEAD_DIM_STEP or shape.head_dim > MAX_HEAD_DIM:
        return f"head_dim must be a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, not {shape.head_dim}"
    return None


def _fault(kernel: Kernel, shape: ModelShape, attention: Attention, *, dtype: torch.dtype, device: torch.device) -> str | None:
    """Errors of a kernel's output and gradients, compared with float32 for this model's heads and windows."""
    generator = torch.Generator(device).manual_seed(0)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    *qkv, grad = (
        torch.randn(sum(_LENGTHS), num, shape.head_dim, generator=generator, device=device).to(dtype) for num in heads
    )
    trial = torch.tensor([0, *_LENGTHS], device=device).cumsum(0, dtype=torch.int32), max(_LENGTHS)
    for window in sorted({0 if window is None else min(window, _SHORT_WINDOW) for window in attention.windows}):
        settings = {"scale": attention.query_scale, "window": window or None, "softcap": None}
        try:
            found = with_gradients(kernel(*trial), qkv, grad, **settings)
        except Exception as error:  # noqa: BLE001  a compiler's, a driver's or an import's, whatever it is: the kernel is not usable
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        expected = with_gradients(PaddedSequences.of(*trial), [x.float() for x in qkv], grad.float(), **settings)
        for name, one, other in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
            difference = float((one.float() - other).norm() / other.norm())
            if not difference < TOLERANCE:
                return f"its {name} is off by {difference:.3f} in norm, with window {window or None}"
    return None


def with_gradients(sequences: Sequences, qkv: list[Tensor], grad_THD: Tensor, **settings: Any) -> list[Tensor]:
    """Output and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out_THD = sequences.attend(*leaves, **settings)
    return [out_THD.detach(), *torch.autograd.grad(out_THD, leaves, grad_THD)]
