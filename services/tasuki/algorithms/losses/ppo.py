"""PPO's clipped surrogate."""

from dataclasses import dataclass

from tasuki.algorithms.loss import RatioInputs, RatioLoss, TokenLoss, clipped
from tasuki.algorithms.setting import check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoLoss(RatioLoss):
    """PPO's clipped surrogate (arXiv:1707.06347 eq. 7), with separate bounds 1 - clip_low and 1 + clip_high (arXiv:2503.14476 eq. 10)."""

    clip_low: float = 0.2
    """The ratio's lower bound is 1 - this."""
    clip_high: float = 0.2
    """The ratio's upper bound is 1 + this."""
    dual_clip: float | None = None
    """Above 1; bounds the loss at -dual_clip * advantage for negative advantages (arXiv:1912.09729)."""

    def __post_init__(self) -> None:
        check_number("clip_low", self.clip_low, least=0.0, most=1.0)
        check_number("clip_high", self.clip_high, least=0.0)
        if self.dual_clip is not None:
            check_number("dual_clip", self.dual_clip, above=1.0)

    def token_loss(self, given: RatioInputs) -> TokenLoss:
        """PPO's pessimistic bound: the larger of each token's clipped and unclipped loss."""
        advantages_N = given.advantages_N
        bounded = clipped(given.log_ratio_N.exp(), advantages_N, clip_low=self.clip_low, clip_high=self.clip_high)
        if self.dual_clip is None:
            return bounded
        bound_N = -advantages_N * self.dual_clip
        is_bound_N = (advantages_N < 0.0) & (bounded.loss_N > bound_N)
        return TokenLoss(bound_N.where(is_bound_N, bounded.loss_N), {**bounded.metrics, "dual_clip_fraction": is_bound_N})


LOSS = PpoLoss
