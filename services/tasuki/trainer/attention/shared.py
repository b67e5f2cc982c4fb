"""Attention with shared prompts or sinks: computed in parts that are merged by log-sum-exp.

Two calls make up a continuation token's attention: causal over its own sequence, and unmasked over the prompt. As in ring attention,
backward calls both again with the merged output and log-sum, which yields the gradients of the whole softmax. The kernels sum the
gradients of a prompt's keys over its continuations. No kernel needs a gradient for its log-sum. A sink is merged alike: a key that
every token sees, with a logit per head and a value of 0.

Shape suffixes: T tokens, X of continuations, H query heads, K key heads, D head size.
Source: the merge is that of blockwise attention, arXiv:2310.01889.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of q, k and v."""


class Settings(NamedTuple):
    """See tasuki.models.family.Attention."""

    scale: float
    window: int | None
    softcap: float | None


class Blocks(Protocol):
    """Pairs of a run of queries and a run of keys, in a kernel's format."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
        """Output, shaped like q, and log-sum-exp of the logits, [H, queries] float32."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: Settings
    ) -> Gradients:
        """out, lse: over all keys that the queries see, in these blocks and others."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SharedSequences:
    """Sequences of a micro-batch, some of which continue a prompt. See attention.Sequences."""

    own: Blocks
    """Every sequence over itself, causal."""
    prompts: Blocks | None = None
    """Continuations over their whole prompt; None if there are none."""
    first: int = 0
    """Number of tokens before the first prompt."""
    num_prefix: int = 0
    num_suffix: int = 0
    """Number of tokens in all prompts, and in all continuations, which follow."""

    def attend(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """[T, H, D]: causal attention within each sample."""
        return _Merged.apply(q_THD, k_TKD, v_TKD, sinks_H, self, Settings(scale, window, softcap))

    def continuing(self, x_T: Tensor) -> Tensor:
        first = self.first + self.num_prefix
        return x_T[first : first + self.num_suffix]

    def shared(self, x_T: Tensor) -> Tensor:
        return x_T[self.first : self.first + self.num_prefix]


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, sequences: SharedSequences, settings: Settings
    ) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse_HT = sequences.own.forward(q, k, v, settings)
        # Copies, since checkpointing may keep the kernels' outputs.
        if sequences.prompts is not None:
            prompt_out, prompt_lse_HX = sequences.prompts.forward(
                sequences.continuing(q), sequences.shared(k), sequences.shared(v), settings
            )
            own_lse_HX = sequences.continuing(lse_HT.T).T
            lse_HX = torch.logaddexp(own_lse_HX, prompt_lse_HX)
            merged_X = sequences.continuing(out) * _weights(own_lse_HX - lse_HX) + prompt_out * _weights(prompt_lse_HX - lse_HX)
            out, lse_TH = out.clone(), lse_HT.T.clone()
            sequences.continuing(out).copy_(merged_X)
            sequences.continuing(lse_TH).copy_(lse_HX.T)
            lse_HT = lse_TH.T.contiguous()
        if sinks_H is not None:
            keys_HT, lse_HT = lse_HT, torch.logaddexp(lse_HT, sinks_H.float().unsqueeze(1))
            out = (out * _weights(keys_HT - lse_HT)).to(out.dtype)
        ctx.save_for_backward(q, k, v, out, lse_HT, sinks_H)
        ctx.sequences, ctx.settings = sequences, settings
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse_HT, sinks_H = ctx.saved_tensors
        sequences, settings, grad = ctx.sequences, ctx.settings, grad.contiguous()
        dq, dk, dv = sequences.own.backward(grad, q, k, v, out, lse_HT, settings)
        if sequences.prompts is not None:
            prompt_dq, prompt_dk, prompt_dv = sequences.prompts.backward(
                sequences.continuing(grad),
                sequences.continuing(q),
                sequences.shared(k),
                sequences.shared(v),
                sequences.continuing(out),
                sequences.continuing(lse_HT.T).T.contiguous(),
                settings,
            )
            sequences.continuing(dq).add_(prompt_dq)
            sequences.shared(dk).add_(prompt_dk)
            sequences.shared(dv).add_(prompt_dv)
        dsinks_H = None
        if sinks_H is not None and ctx.needs_input_grad[3]:
            shares_HT = (sinks_H.float().unsqueeze(1) - lse_HT).exp()
            dsinks_H = -(shares_HT * (grad.float() * out.float()).sum(-1).T).sum(1).to(sinks_H.dtype)
        return dq, dk, dv, dsinks_H, None, None


def _weights(logs_HX: Tensor) -> Tensor:
    """[X, H, 1] float32."""
    return logs_HX.exp().T.unsqueeze(-1)
