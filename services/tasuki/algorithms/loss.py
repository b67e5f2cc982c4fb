"""What a loss is. Torch-free: client and configuration import the settings of losses. Shape suffix: N tokens."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from tasuki.algorithms.batch import LossBatch

# exp(20) is far outside any useful range; larger values overflow float32 and make the gradient NaN.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """The loss of each token, to be minimized, before correction and aggregation."""

    loss_N: "Tensor"
    metrics: "Mapping[str, Tensor]" = field(default_factory=dict)
    """[N] each: reported as means over counted tokens; "ratio" also as its maximum."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RatioInputs:
    """What a loss with a ratio is computed from. Tensors [N] are float32."""

    log_probs_N: "Tensor"
    """Of the policy, with gradient."""
    old_log_probs_N: "Tensor"
    log_ratio_N: "Tensor"
    """log_probs_N - old_log_probs_N, with gradient, clamped to [-20, 20]."""
    advantages_N: "Tensor"
    batch: "LossBatch"


class _Settings(ABC):
    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]


class PolicyLoss(_Settings):
    """A loss of the policy without a ratio. Subclasses are frozen dataclasses of their settings."""

    __slots__ = ()
    has_advantages: ClassVar[bool] = False

    @abstractmethod
    def token_loss(self, log_probs_N: "Tensor", batch: "LossBatch") -> TokenLoss: ...


class RatioLoss(_Settings):
    """A loss that weighs advantages by the ratio of the policy to an old policy. Subclasses are frozen dataclasses of their settings."""

    __slots__ = ()

    @abstractmethod
    def token_loss(self, given: RatioInputs) -> TokenLoss: ...


class CriticLoss(_Settings):
    """A loss of the critic's values. Subclasses are frozen dataclasses of their settings."""

    __slots__ = ()

    @property
    @abstractmethod
    def needs_old_values(self) -> bool:
        """Whether it needs the values before the first step on the batch."""

    @abstractmethod
    def token_loss(self, values_N: "Tensor", batch: "LossBatch") -> TokenLoss: ...


Loss = RatioLoss | PolicyLoss | CriticLoss


def clipped(ratio_N: "Tensor", advantages_N: "Tensor", *, clip_low: float, clip_high: float) -> TokenLoss:
    """The larger of each token's loss with and without a ratio clipped to [1 - clip_low, 1 + clip_high]."""
    unclipped_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    is_clipped_N = clipped_N > unclipped_N
    metrics = clip_metrics(ratio_N, low_N=is_clipped_N & (advantages_N < 0.0), high_N=is_clipped_N & (advantages_N > 0.0))
    return TokenLoss(unclipped_N.maximum(clipped_N), metrics)


def clip_metrics(ratio_N: "Tensor", *, low_N: "Tensor", high_N: "Tensor") -> "dict[str, Tensor]":
    """Metrics of a ratio before its clip. low_N, high_N: bool, whether the lower or upper bound applied."""
    return {"ratio": ratio_N, "clip_fraction": low_N | high_N, "clip_fraction_low": low_N, "clip_fraction_high": high_N}
