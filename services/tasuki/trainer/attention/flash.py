"""FlashAttention over packed sequences on a GPU: FlashAttention-4, or FlashAttention-2 from torch.

Shape suffixes: S sequences, T their tokens, H query heads, K key heads, D head size.
"""

from dataclasses import dataclass

import torch
import torch.nn.attention.varlen  # registers its operators
from torch import Tensor

from tasuki.trainer.attention.shared import Gradients, Settings
from tasuki.trainer.data.micro_batch import SharedPrompts

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of queries, each over a run of keys."""

    cu_queries_S: Tensor
    """[S + 1] int32: boundaries of the runs."""
    cu_keys_S: Tensor
    max_queries: int
    max_keys: int
    is_causal: bool
    """Whether queries and keys are the same runs with causal attention; otherwise each query sees all keys of its run."""

    def window(self, settings: Settings) -> int | None:
        """Number of keys visible before a query's own; None for all."""
        assert settings.softcap is None, "attention.choose_kernel refuses it"
        assert settings.window is None or self.is_causal, "attention.fault_with_shared_prompts refuses it"
        return None if settings.window is None else settings.window - 1


@dataclass(frozen=True, slots=True, eq=False)
class Fa4Blocks:
    """FlashAttention-4. Its backward uses the given log-sum, whatever keys that covers.

    Kernels that are not in its cache are compiled at their first call, in 10 to 13 s each.
    """

    runs: Runs

    def forward(self, q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
        """See attention_shared.Blocks."""
        runs = self.runs
        counts = runs.cu_queries_S, runs.cu_keys_S, runs.max_queries, runs.max_keys
        return block_attention(q, k, v, *counts, settings.scale, runs.is_causal, runs.window(settings))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: Settings
    ) -> Gradients:
        """See attention_shared.Blocks."""
        from flash_attn.cute.interface import _flash_attn_bwd

        runs = self.runs
        return _flash_attn_bwd(
            q,
            k,
            v,
            out,
            grad,
            lse,
            softmax_scale=settings.scale,
            causal=runs.is_causal,
            window_size_left=runs.window(settings),
            cu_seqlens_q=runs.cu_queries_S,
            cu_seqlens_k=runs.cu_keys_S,
            max_seqlen_q=runs.max_queries,
            max_seqlen_k=runs.max_keys,
        )


@dataclass(frozen=True, slots=True, eq=False)
class VarlenBlocks:
    """torch's `varlen_attn`."""

    runs: Runs

    def forward(self, q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
        """See attention_shared.Blocks."""
        out, lse, _ = torch.ops.torch_attn._varlen_attn(q, k, v, *self._counts(), settings.scale, self._window(settings))
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: Settings
    ) -> Gradients:
        """See attention_shared.Blocks."""
        # For dropout, which is off.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return torch.ops.torch_attn._varlen_attn_backward(
            grad, q, k, v, out, lse, *self._counts(), state, settings.scale, self._window(settings)
        )

    def _counts(self) -> tuple[Tensor, Tensor, int, int, bool]:
        runs = self.runs
        return runs.cu_queries_S, runs.cu_keys_S, runs.max_queries, runs.max_keys, runs.is_causal

    def _window(self, settings: Settings) -> list[int]:
        before = self.runs.window(settings)
        return [-1 if before is None else before, 0 if self.runs.is_causal else -1]


def own_runs(cu_seqlens_S: Tensor, max_seqlen: int) -> Runs:
    """Every sequence over itself."""
    return Runs(cu_seqlens_S, cu_seqlens_S, max_seqlen, max_seqlen, is_causal=True)


def prompt_runs(prompts: SharedPrompts) -> Runs:
    """Continuations over their prompt."""
    longest = max(prompts.num_suffix), max(prompts.num_prefix)
    return Runs(prompts.cu_suffix_G, prompts.cu_prefix_G, *longest, is_causal=False)


@torch.library.custom_op(
    "tasuki::block_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor cu_queries, Tensor cu_keys, int max_queries, int max_keys, float scale, "
    "bool is_causal, int? before) -> (Tensor, Tensor)",
)
def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_queries_S: Tensor,
    cu_keys_S: Tensor,
    max_queries: int,
    max_keys: int,
    scale: float,
    is_causal: bool,
    before: int | None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-4 as a torch operator, without gradients. before: number of keys visible before a query's own; None for all.

    Returns the output, shaped like q, and log-sum-exp of the logits, [H, queries] float32. All tensors must be contiguous and aligned to
    16 bytes; b15 misreads others (https://github.com/Dao-AILab/flash-attention/issues/2745).
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    # Lengths must be Python numbers: with tensors it compiles each (https://github.com/Dao-AILab/flash-attention/issues/2507).
    out, lse, *_ = _flash_attn_fwd(
        q,
        k,
        v,
        cu_seqlens_q=cu_queries_S,
        cu_seqlens_k=cu_keys_S,
        max_seqlen_q=max_queries,
        max_seqlen_k=max_keys,
        softmax_scale=scale,
        causal=is_causal,
        window_size_left=before,
        return_lse=True,
    )
    return out, lse


@block_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
