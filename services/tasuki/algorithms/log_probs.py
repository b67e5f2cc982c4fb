"""Log-probabilities of given tokens from logits, without a float32 copy of all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows are worked on in blocks of this many float32 values (64 MiB), so the temporaries do not grow with the batch.
_BLOCK_VALUES = 1 << 24


def token_log_probs(logits_TV: Tensor, token_ids_T: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Natural log-probability of each token, and the entropy of the distribution it was drawn from.

    logits_TV: [T, V], any floating dtype; token_ids_T: [T] int64 in [0, V); temperature > 0 divides the logits.
    Returns two float32 tensors [T]: log-probs, which carry a gradient to the logits, and entropies in nats, which carry none.
    All arithmetic is in float32; the gradient comes in the logits' dtype.
    """
    return _TokenLogProbs.apply(logits_TV, token_ids_T, temperature)


class _TokenLogProbs(torch.autograd.Function):
    """Keeps the logits and one log-sum-exp per row for backward, and computes the softmax anew there, block by block."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, token_ids_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        num_tokens = logits_TV.shape[0]
        log_probs_T, entropy_T, log_sum_T = (logits_TV.new_empty(num_tokens, dtype=torch.float32) for _ in range(3))
        for rows in _blocks(logits_TV):
            scaled = _scaled(logits_TV[rows], temperature)
            log_sum = torch.logsumexp(scaled, dim=-1)
            all_log_probs = scaled.sub_(log_sum.unsqueeze(-1))
            log_sum_T[rows] = log_sum
            log_probs_T[rows] = all_log_probs.gather(-1, token_ids_T[rows].unsqueeze(-1)).squeeze(-1)
            entropy_T[rows] = -torch.linalg.vecdot(all_log_probs.exp(), all_log_probs)
        ctx.save_for_backward(logits_TV, token_ids_T, log_sum_T)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_T)
        return log_probs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  the decorator hides the name of its first parameter
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None]:
        grad_T = grads[0]  # the entropy is not differentiable
        logits_TV, token_ids_T, log_sum_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        for rows in _blocks(logits_TV):
            probs = _scaled(logits_TV[rows], ctx.temperature).sub_(log_sum_T[rows].unsqueeze(-1)).exp_()
            grad = grad_T[rows].unsqueeze(-1) / ctx.temperature
            grad_logits = probs.mul_(-grad).scatter_add_(-1, token_ids_T[rows].unsqueeze(-1), grad)
            grad_TV[rows] = grad_logits.to(grad_TV.dtype)
        return grad_TV, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """A float32 copy of `logits`, divided by the temperature."""
    copy = logits.to(torch.float32, copy=True)
    return copy if temperature == 1.0 else copy.div_(temperature)


def _blocks(logits_TV: Tensor) -> list[slice]:
    num_tokens, vocab_size = logits_TV.shape
    num_rows = max(1, _BLOCK_VALUES // vocab_size)
    return [slice(start, start + num_rows) for start in range(0, num_tokens, num_rows)]
