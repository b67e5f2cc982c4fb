"""Softmax over a vocabulary in tiles: its state and gradient, in plain torch.

Shape suffixes: N positions, C the vocabulary of a tile, which starts at token `first_id`.
"""

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

# exp() of it is 0 in float32. Smaller differences are raised to it, since 0 times minus infinity would be NaN.
FLOOR = -1e4
# Lower bound of maxima, so that they can be subtracted from each other.
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class Places:
    """Scaling of the logits, and the target token of each position."""

    token_ids_N: Tensor
    """int64."""
    temperature_N: Tensor
    """float32."""
    softcap: float | None

    def scaled(self, logits_NC: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Capped logits, each row divided by its temperature; written to `out` if given."""
        temperature = self.temperature_N.unsqueeze(-1)
        if self.softcap is None:
            return torch.div(logits_NC, temperature, out=out)
        return torch.div(logits_NC, self.softcap, out=out).tanh_().mul_(self.softcap).div_(temperature)


@dataclass(frozen=True, slots=True)
class RunningSoftmax:
    """Softmax of each position over the tiles so far; see "Online normalizer calculation for softmax" (arXiv:1805.02867)."""

    values_4N: Tensor
    """float32, with z the scaled logits: max z, sum of exp(z - max), sum of exp(z - max) (z - max), and z of the target token."""

    @classmethod
    def empty(cls, places: Places) -> Self:
        values_4N = torch.zeros(4, len(places.token_ids_N), device=places.token_ids_N.device)
        values_4N[0] = LOWEST
        return cls(values_4N)

    @classmethod
    def joined(cls, shards_R4N: Tensor, owner_N: Tensor) -> Self:
        """Over R shards of the vocabulary. owner_N: int64, the shard of each target token."""
        max_RN, sum_RN, product_RN, token_RN = shards_R4N.unbind(1)
        max_N = max_RN.amax(0)
        shift_RN = (max_RN - max_N).clamp_(min=FLOOR)
        factor_RN = shift_RN.exp()
        product_N = ((product_RN + sum_RN * shift_RN) * factor_RN).sum(0)
        token_N = token_RN.gather(0, owner_N.unsqueeze(0)).squeeze(0)
        return cls(torch.stack((max_N, (sum_RN * factor_RN).sum(0), product_N, token_N)))

    def log_sum(self) -> Tensor:
        """[N]: log of the sum of exp(z)."""
        return self.values_4N[0] + self.values_4N[1].log()

    def log_probs(self) -> Tensor:
        """[N]: of the target tokens."""
        max_N, sum_N, _, token_N = self.values_4N
        return (token_N - max_N) - sum_N.log()

    def entropy(self) -> Tensor:
        """[N], nats."""
        _, sum_N, product_N, _ = self.values_4N
        return sum_N.log() - product_N / sum_N


@dataclass(frozen=True, slots=True)
class SoftmaxGradient:
    """From p = softmax(z / T) to the loss's gradient: d(log_prob)/dz = (onehot - p) / T, dH/dz = -p (log p + H) / T."""

    log_sum_N: Tensor
    entropy_N: Tensor
    log_prob_factor_N: Tensor | None
    """Gradient of the log-prob divided by the temperature; None if unused."""
    entropy_factor_N: Tensor | None
    """The same for the entropy."""

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
        """Builds it from the loss's gradients with respect to both results."""
        factors = (None if grad_N is None else grad_N / places.temperature_N for grad_N in (grad_log_probs_N, grad_entropy_N))
        return cls(log_sum_N, entropy_N, *factors)


class TileKernels(Protocol):
    """Operations on the float32 logits of a tile, as module functions: of this module, and of lm_head_triton."""

    def fold(self, logits_NC: Tensor, softmax: RunningSoftmax, places: Places, *, first_id: int) -> None:
        """Accumulates a tile in `softmax`."""
        ...

    def gradient(
        self, logits_NC: Tensor, softmax: SoftmaxGradient, places: Places, *, first_id: int, dtype: torch.dtype
    ) -> Tensor:
        """[N, C]: gradient of the loss with respect to the logits, in `dtype`. May overwrite `logits_NC`."""
        ...


def fold(logits_NC: Tensor, softmax: RunningSoftmax, places: Places, *, first_id: int) -> None:
    is_first = first_id == 0
    max_N, sum_N, product_N, token_N = tile_4N = softmax.values_4N if is_first else torch.empty_like(softmax.values_4N)
    scaled_NC = places.scaled(logits_NC)
    columns_N, is_here_N = _columns(places, first_id=first_id, num_columns=logits_NC.shape[-1])
    torch.gather(scaled_NC, -1, columns_N.unsqueeze(-1), out=token_N.unsqueeze(-1))
    torch.amax(scaled_NC, -1, out=max_N).clamp_(min=LOWEST)
    scaled_NC.sub_(max_N.unsqueeze(-1)).clamp_(min=FLOOR)
    exp_NC = scaled_NC.exp()
    torch.sum(exp_NC, -1, out=sum_N)
    torch.sum(scaled_NC.mul_(exp_NC), -1, out=product_N)
    if not is_first:
        _merge(tile_4N, softmax.values_4N, is_here_N)


def _merge(tile_4N: Tensor, values_4N: Tensor, is_here_N: Tensor) -> None:
    """Merges a tile's values into those of earlier tiles, in place. is_here_N: whether the target token is in this tile."""
    (tile_max_N, tile_sum_N, tile_product_N, tile_token_N), (max_N, sum_N, product_N, token_N) = tile_4N, values_4N
    new_max_N = torch.maximum(max_N, tile_max_N)
    for each_max_N, each_sum_N, each_product_N in ((max_N, sum_N, product_N), (tile_max_N, tile_sum_N, tile_product_N)):
        shift_N = (each_max_N - new_max_N).clamp_(min=FLOOR)
        each_product_N.addcmul_(each_sum_N, shift_N).mul_(shift_N.exp())
        each_sum_N.mul_(shift_N.exp())
    max_N.copy_(new_max_N)
    sum_N.add_(tile_sum_N)
    product_N.add_(tile_product_N)
    token_N.copy_(torch.where(is_here_N, tile_token_N, token_N))


def gradient(logits_NC: Tensor, softmax: SoftmaxGradient, places: Places, *, first_id: int, dtype: torch.dtype) -> Tensor:
    columns_N, is_here_N = _columns(places, first_id=first_id, num_columns=logits_NC.shape[-1])
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
        grad_NC.scatter_add_(-1, columns_N.unsqueeze(-1), (log_prob_factor_N * is_here_N).unsqueeze(-1))
    if slope_NC is not None:
        grad_NC.mul_(slope_NC)
    return grad_NC.to(dtype)


def _columns(places: Places, *, first_id: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """[N]: column of each target token, arbitrary if it is in another tile; [N]: whether it is in this one."""
    columns_N = places.token_ids_N - first_id
    clamped_N = columns_N.clamp(0, num_columns - 1)
    return clamped_N, clamped_N == columns_N
