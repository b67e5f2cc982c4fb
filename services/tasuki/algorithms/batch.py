"""Inputs and results of losses.

Shape suffixes: N completion tokens of a micro-batch, counted or not, concatenated by sample; S samples.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossBatch:
    """A micro-batch without its logits. Tensors [N] are float32, except `is_current_N`."""

    cu_seqlens_S: Tensor
    """[S+1] int64: sample s has the tokens from cu_seqlens_S[s] to cu_seqlens_S[s+1]."""
    weights_N: Tensor
    """Weight of each token in the loss, from `aggregation.token_weights`; 0 where the mask is 0."""
    loss_mask_N: Tensor
    """1 for tokens that count, 0 for others, such as a tool's output."""
    is_current_N: Tensor
    """bool: whether the token comes from the policy version in training."""
    rollout_log_probs_N: Tensor | None = None
    old_log_probs_N: Tensor | None = None
    advantages_N: Tensor | None = None
    ref_log_probs_N: Tensor | None = None
    values_N: Tensor | None = None
    """Values before the first step on the batch."""
    returns_N: Tensor | None = None

    def counted_means(self, x_N: Tensor) -> Tensor:
        """[N] float64: for each token, the mean of x over the counted tokens of its sample."""
        counted_S = sample_sums(self.loss_mask_N, self.cu_seqlens_S).clamp(min=1.0)
        masked_N = torch.where(self.loss_mask_N != 0.0, x_N * self.loss_mask_N, 0.0)
        mean_S = sample_sums(masked_N, self.cu_seqlens_S) / counted_S
        return to_tokens(mean_S, self.cu_seqlens_S, num_tokens=len(x_N))


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A part of a metric, on the device. Parts of micro-batches and ranks are combined with `merge`."""

    total: Tensor
    """[]: a sum for "mean", a maximum for "max"."""
    weight: Tensor
    """[]: divisor of `total`."""
    kind: Literal["mean", "max"] = "mean"

    def merge(self, other: "Metric") -> "Metric":
        """Combines two parts."""
        assert self.kind == other.kind
        combine = torch.maximum if self.kind == "max" else torch.add
        return Metric(combine(self.total, other.total), self.weight + other.weight, self.kind)

    @property
    def value(self) -> Tensor:
        """[]: value of the metric; NaN if it counts no token."""
        return self.total / self.weight if self.kind == "mean" else torch.where(self.weight > 0, self.total, torch.nan)


@dataclass(frozen=True, slots=True, eq=False)
class LossSum:
    """A micro-batch's part of a loss. Parts of all micro-batches and ranks sum to the loss."""

    loss: Tensor
    """[], with gradient."""
    metrics: dict[str, Metric]


def weighted_sum(x_N: Tensor, weights_N: Tensor) -> Tensor:
    """[]: weighted sum. Elements of weight 0 contribute exactly 0, also to the gradient, even if not finite."""
    return torch.dot(torch.where(weights_N != 0.0, x_N, 0.0), weights_N)


def mean_metric(x_N: Tensor, weights_N: Tensor) -> Metric:
    """Weighted mean of x over tokens."""
    weights_N = weights_N.to(x_N.dtype) if x_N.is_floating_point() else weights_N
    return Metric(weighted_sum(x_N.detach().to(weights_N.dtype), weights_N), weights_N.sum())


def max_metric(x_N: Tensor, loss_mask_N: Tensor) -> Metric:
    """Maximum of x over counted tokens; x must not be negative. The total is 0 if none counts."""
    counted_N = torch.where(loss_mask_N != 0.0, x_N.detach(), 0.0)
    total = counted_N.max() if counted_N.numel() else counted_N.sum()
    return Metric(total, loss_mask_N.sum(), "max")


def sample_sums(x_N: Tensor, cu_seqlens_S: Tensor) -> Tensor:
    """[S] float64: sum of x over each sample's tokens; deterministic, unlike a scattered sum on a GPU."""
    return torch.segment_reduce(x_N.double(), "sum", offsets=cu_seqlens_S, unsafe=True)


def to_tokens(x_S: Tensor, cu_seqlens_S: Tensor, *, num_tokens: int) -> Tensor:
    """[N]: repeats each sample's x for all its tokens."""
    return torch.repeat_interleave(x_S, cu_seqlens_S.diff(), output_size=num_tokens)
