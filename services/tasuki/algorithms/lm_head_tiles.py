"""The softmax over a vocabulary that comes in tiles: its state, its gradient, and both in plain torch.

Shape suffixes: N places, C the vocabulary of a tile, which begins at token `first_id`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

# exp() of it is 0 in float32. Differences below are raised to it: 0 times minus infinity would be NaN.
FLOOR = -1e4


@dataclass(frozen=True, slots=True)
class Places:
    """What makes scaled logits out of logits, and the token that is looked for."""

    token_ids_N: Tensor
    """int64."""
    temperature_N: Tensor
    """float32."""
    softcap: float | None

    def scaled(self, logits_NC: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Capped logits, each row divided by its temperature; in `out`, if given."""
        temperature = self.temperature_N.unsqueeze(-1)
        if self.softcap is None:
            return torch.div(logits_NC, temperature, out=out)
        return torch.div(logits_NC, self.softcap, out=out).tanh_().mul_(self.softcap).div_(temperature)


@dataclass(frozen=True, slots=True)
class RunningSoftmax:
    """Softmax of each place over the tiles so far, as in online softmax (arXiv:1805.02867). With z the scaled logits:"""

    values_4N: Tensor
    """float32: max z, sum of exp(z - max), sum of exp(z - max) (z - max), and z of the place's token."""

    @classmethod
    def empty(cls, places: Places) -> Self:
        values_4N = torch.zeros(4, len(places.token_ids_N), device=places.token_ids_N.device)
        # Finite, so that it can be subtracted from itself.
        values_4N[0] = torch.finfo(torch.float32).min
        return cls(values_4N)

    def log_sum(self) -> Tensor:
        """[N]: log of the sum of exp(z)."""
        return self.values_4N[0] + self.values_4N[1].log()

    def log_probs(self) -> Tensor:
        """[N]: of the places' tokens."""
        max_N, sum_N, _, token_N = self.values_4N
        return (token_N - max_N) - sum_N.log()

    def entropy(self) -> Tensor:
        """[N], nats."""
        _, sum_N, product_N, _ = self.values_4N
        return sum_N.log() - product_N / sum_N


@dataclass(frozen=True, slots=True)
class SoftmaxGradient:
    """From p = softmax(z / T) to the gradient of the loss: d(log_prob)/dz = (onehot - p) / T, dH/dz = -p (log p + H) / T."""

    log_sum_N: Tensor
    entropy_N: Tensor
    log_prob_factor_N: Tensor | None
    """Gradient of the log-prob, divided by the temperature."""
    entropy_factor_N: Tensor | None
    """The same of the entropy."""

    @classmethod
    def of(
        cls,
        log_sum_N: Tensor,
        entropy_N: Tensor,
        grad_log_probs_N: Tensor | None,
        grad_entropy_N: Tensor | None,
        *,
        places: Places,
    ) -> Self:
        """From the gradients of the loss to both results."""
        factors = (None if grad_N is None else grad_N / places.temperature_N for grad_N in (grad_log_probs_N, grad_entropy_N))
        return cls(log_sum_N, entropy_N, *factors)


class TileKernels(Protocol):
    """What happens to the float32 logits of a tile. A module has these functions: this one, and lm_head_triton."""

    def fold(self, logits_NC: Tensor, softmax: RunningSoftmax, places: Places, *, first_id: int) -> None:
        """Adds a tile to `softmax`."""
        ...

    def gradient(
        self, logits_NC: Tensor, softmax: SoftmaxGradient, places: Places, *, first_id: int, dtype: torch.dtype
    ) -> Tensor:
        """[N, C]: gradient of the loss to the logits, in `dtype`. May overwrite `logits_NC`."""
        ...


def fold(logits_NC: Tensor, softmax: RunningSoftmax, places: Places, *, first_id: int) -> None:
    max_N, sum_N, product_N, token_N = softmax.values_4N
    scaled_NC = places.scaled(logits_NC)
    columns, is_here_N = _columns(places, first_id=first_id, num_columns=logits_NC.shape[-1])
    token_N.copy_(torch.where(is_here_N, scaled_NC.gather(-1, columns).squeeze(-1), token_N))
    new_max_N = torch.maximum(max_N, scaled_NC.amax(-1))
    shift_N = (max_N - new_max_N).clamp_(min=FLOOR)
    scaled_NC.sub_(new_max_N.unsqueeze(-1)).clamp_(min=FLOOR)
    exp_NC = scaled_NC.exp()
    factor_N = shift_N.exp()
    product_N.addcmul_(sum_N, shift_N).mul_(factor_N).add_(torch.linalg.vecdot(exp_NC, scaled_NC))
    sum_N.mul_(factor_N).add_(exp_NC.sum(-1))
    max_N.copy_(new_max_N)


def gradient(logits_NC: Tensor, softmax: SoftmaxGradient, places: Places, *, first_id: int, dtype: torch.dtype) -> Tensor:
    columns, is_here_N = _columns(places, first_id=first_id, num_columns=logits_NC.shape[-1])
    scaled_NC = places.scaled(logits_NC, out=logits_NC)
    slope_NC = None
    if places.softcap is not None:
        slope_NC = 1 - (scaled_NC * (places.temperature_N / places.softcap).unsqueeze(-1)).square_()
    log_prob_factor_N, entropy_factor_N = softmax.log_prob_factor_N, softmax.entropy_factor_N
    log_probs_NC = scaled_NC.sub_(softmax.log_sum_N.unsqueeze(-1))
    if entropy_factor_N is None:
        assert log_prob_factor_N is not None
        grad_NC = log_probs_NC.exp_().mul_(-log_prob_factor_N.unsqueeze(-1))
    else:
        grad_NC = log_probs_NC.exp()
        factor_NC = log_probs_NC.clamp_(min=FLOOR).add_(softmax.entropy_N.unsqueeze(-1)).mul_(-entropy_factor_N.unsqueeze(-1))
        grad_NC.mul_(factor_NC if log_prob_factor_N is None else factor_NC.sub_(log_prob_factor_N.unsqueeze(-1)))
    if log_prob_factor_N is not None:
        grad_NC.scatter_add_(-1, columns, (log_prob_factor_N * is_here_N).unsqueeze(-1))
    if slope_NC is not None:
        grad_NC.mul_(slope_NC)
    return grad_NC.to(dtype)


def _columns(places: Places, *, first_id: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Column of each place's token [N, 1], some column if it is in another tile; and [N] whether it is in this one."""
    columns_N = places.token_ids_N - first_id
    is_here_N = (columns_N >= 0) & (columns_N < num_columns)
    return columns_N.clamp_(0, num_columns - 1).unsqueeze(-1), is_here_N
