"""Log-probabilities of given tokens, and entropies, from logits; without a float32 copy of all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows are worked on in blocks of this many float32 values (64 MiB), so the temporaries do not grow with the batch.
_BLOCK_VALUES = 1 << 24


def token_log_probs(logits_NV: Tensor, token_ids_N: Tensor, *, temperature_N: Tensor) -> tuple[Tensor, Tensor]:
    """Natural log-probability of each token, and the entropy of the distribution it was drawn from.

    logits_NV: [N, V], any floating dtype; token_ids_N: [N] int64 in [0, V); temperature_N: [N] float32, greater than 0, divides
    the logits of its row.
    Returns two float32 tensors [N]: log-probs, and entropies in nats. Both carry a gradient to the logits, in the logits' dtype; the
    entropy's costs nothing unless it is used. All arithmetic is in float32.
    """
    return _TokenLogProbs.apply(logits_NV, token_ids_N, temperature_N)


class _TokenLogProbs(torch.autograd.Function):
    """Keeps the logits and two numbers per row for backward, and computes the softmax again there, block by block."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, token_ids_N: Tensor, temperature_N: Tensor) -> tuple[Tensor, Tensor]:
        num_tokens = logits_NV.shape[0]
        log_probs_N, entropy_N, log_sum_N = (logits_NV.new_empty(num_tokens, dtype=torch.float32) for _ in range(3))
        for rows in _blocks(logits_NV):
            scaled = _scaled(logits_NV[rows], temperature_N[rows])
            log_sum = torch.logsumexp(scaled, dim=-1)
            all_log_probs = scaled.sub_(log_sum.unsqueeze(-1))
            log_sum_N[rows] = log_sum
            log_probs_N[rows] = all_log_probs.gather(-1, _column(token_ids_N, rows)).squeeze(-1)
            entropy_N[rows] = -torch.linalg.vecdot(all_log_probs.exp(), all_log_probs)
        ctx.save_for_backward(logits_NV, token_ids_N, temperature_N, log_sum_N, entropy_N)
        ctx.set_materialize_grads(False)
        return log_probs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  the decorator hides the name of its first parameter
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        """With p = softmax(z / T): d(log_prob)/dz = (onehot - p) / T, and dH/dz = -p * (log p + H) / T."""
        grad_log_probs_N, grad_entropy_N = grads
        logits_NV, token_ids_N, temperature_N, log_sum_N, entropy_N = ctx.saved_tensors
        if grad_log_probs_N is None and grad_entropy_N is None:
            return None, None, None
        # Per row, so that dividing by the temperature takes no pass over the vocabulary.
        row_grad_N = None if grad_log_probs_N is None else grad_log_probs_N / temperature_N
        row_grad_entropy_N = None if grad_entropy_N is None else grad_entropy_N / temperature_N
        grad_NV = torch.empty_like(logits_NV)
        for rows in _blocks(logits_NV):
            all_log_probs = _scaled(logits_NV[rows], temperature_N[rows]).sub_(log_sum_N[rows].unsqueeze(-1))
            if row_grad_entropy_N is None:
                grad = all_log_probs.exp_().mul_(-_column(row_grad_N, rows))
            else:
                grad = all_log_probs.exp()
                factor = all_log_probs.add_(_column(entropy_N, rows)).mul_(-_column(row_grad_entropy_N, rows))
                grad.mul_(factor if row_grad_N is None else factor.sub_(_column(row_grad_N, rows)))
            if row_grad_N is not None:
                grad.scatter_add_(-1, _column(token_ids_N, rows), _column(row_grad_N, rows))
            grad_NV[rows] = grad.to(grad_NV.dtype)
        return grad_NV, None, None


def _column(x_N: Tensor | None, rows: slice) -> Tensor:
    assert x_N is not None
    return x_N[rows].unsqueeze(-1)


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """A float32 copy of `logits`, each row divided by its temperature."""
    return logits.to(torch.float32, copy=True).div_(temperature.unsqueeze(-1))


def _blocks(logits_NV: Tensor) -> list[slice]:
    num_tokens, vocab_size = logits_NV.shape
    num_rows = max(1, _BLOCK_VALUES // vocab_size)
    return [slice(start, start + num_rows) for start in range(0, num_tokens, num_rows)]
