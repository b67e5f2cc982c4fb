"""FlashAttention over packed sequences on a GPU: FlashAttention-4, or FlashAttention-2 from torch.

Shape suffixes: S sequences, T their tokens, H query heads, K key heads, D head size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tasuki.trainer.attention.shared import Gradients, Settings
from tasuki.trainer.data.micro_batch import SharedPrompts

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8


@dataclass(frozen=True, slots=True, eq=False)
class Fa4Sequences:
    """FlashAttention-4. Kernels that are not in its cache are compiled at their first call, in 10 to 13 s each."""

    cu_seqlens_S: Tensor
    max_seqlen: int

    def attend(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """[T, H, D]. See attention.Sequences."""
        assert softcap is None, "attention.choose_kernel refuses it"
        q, k, v = (x.contiguous() for x in (q_THD, k_TKD, v_TKD))
        return packed_attention(q, k, v, self.cu_seqlens_S, self.max_seqlen, scale, window)[0]


@dataclass(frozen=True, slots=True, eq=False)
class VarlenSequences:
    """torch's `varlen_attn`."""

    cu_seqlens_S: Tensor
    max_seqlen: int

    def attend(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """[T, H, D]. See attention.Sequences."""
        assert softcap is None, "attention.choose_kernel refuses it"
        q, k, v = (x.contiguous() for x in (q_THD, k_TKD, v_TKD))
        starts, longest = self.cu_seqlens_S, self.max_seqlen
        seen = (-1 if window is None else window - 1, 0)
        return varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, window_size=seen)  # pyright: ignore[reportReturnType]


@torch.library.custom_op(
    "tasuki::packed_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, int max_seqlen, float scale, int? window) -> (Tensor, Tensor)",
)
def packed_attention(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens_S: Tensor, max_seqlen: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """FlashAttention-4 as a torch operator: returns output [T, H, D] and log-sum-exp of the scaled logits, [H, T] float32.

    Both have gradients. All tensors must be contiguous and aligned to 16 bytes; b15 misreads others
    (https://github.com/Dao-AILab/flash-attention/issues/2745).
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    # Lengths must be Python numbers: with tensors it compiles each (https://github.com/Dao-AILab/flash-attention/issues/2507).
    out, lse, *_ = _flash_attn_fwd(
        q_THD,
        k_TKD,
        v_TKD,
        cu_seqlens_q=cu_seqlens_S,
        cu_seqlens_k=cu_seqlens_S,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        softmax_scale=scale,
        causal=True,
        window_size_left=None if window is None else window - 1,
        return_lse=True,
    )
    return out, lse


@packed_attention.register_fake
def _(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens_S: Tensor, max_seqlen: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = q_THD.shape
    return torch.empty_like(q_THD), q_THD.new_empty(num_heads, num_tokens, dtype=torch.float32)


@torch.library.custom_op(
    "tasuki::packed_attention_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor grad_out, Tensor? grad_lse, Tensor cu_seqlens, "
    "int max_seqlen, float scale, int? window) -> (Tensor, Tensor, Tensor)",
)
def _packed_attention_backward(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    grad_out_THD: Tensor,
    grad_lse_HT: Tensor | None,
    cu_seqlens_S: Tensor,
    max_seqlen: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    from flash_attn.cute.interface import _flash_attn_bwd

    return _flash_attn_bwd(
        q_THD,
        k_TKD,
        v_TKD,
        out_THD,
        grad_out_THD.contiguous(),
        lse_HT,
        softmax_scale=scale,
        causal=True,
        window_size_left=None if window is None else window - 1,
        cu_seqlens_q=cu_seqlens_S,
        cu_seqlens_k=cu_seqlens_S,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        dlse=grad_lse_HT,
    )


@_packed_attention_backward.register_fake
def _(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_THD), torch.empty_like(k_TKD), torch.empty_like(v_TKD)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens_S, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_S)
    # Makes an unused log-sum free.
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad_out_THD: Tensor | None, grad_lse_HT: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens_S = ctx.saved_tensors
    if grad_out_THD is None:
        grad_out_THD = torch.zeros_like(out)
    grads = _packed_attention_backward(q, k, v, out, lse, grad_out_THD, grad_lse_HT, cu_seqlens_S, *ctx.settings)
    return *grads, None, None, None, None


packed_attention.register_autograd(_gradients, setup_context=_keep)


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
        assert settings.window is None or self.is_causal, "attention.fault_with_shared_prompts refuses it"
        return None if settings.window is None else settings.window - 1


@dataclass(frozen=True, slots=True, eq=False)
class Fa4Blocks:
    """FlashAttention-4. Its backward uses the given log-sum, whatever keys that covers."""

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

    Returns the output, shaped like q, and log-sum-exp of the logits, [H, queries] float32.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

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
