"""CISPO: a clipped importance weight."""

from dataclasses import dataclass

from tasuki.algorithms.loss import RatioInputs, RatioLoss, TokenLoss, clip_metrics
from tasuki.algorithms.setting import check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoLoss(RatioLoss):
    """CISPO: the clipped ratio weighs the policy gradient, so that no token loses its gradient (arXiv:2506.13585 eq. 4).

    The paper leaves the lower bound open (clip_low 1). An upper bound of 5 is within ScaleRL's range (arXiv:2510.13786) and TRL's advice.
    """

    clip_low: float = 1.0
    """The ratio's lower bound is 1 - this."""
    clip_high: float = 4.0
    """The ratio's upper bound is 1 + this."""

    def __post_init__(self) -> None:
        check_number("clip_low", self.clip_low, least=0.0, most=1.0)
        check_number("clip_high", self.clip_high, least=0.0)

    def token_loss(self, given: RatioInputs) -> TokenLoss:
        """-clip(ratio) * advantage * log_prob, where the clipped ratio is a constant.

        Source: CISPO, MiniMax-M1 (arXiv:2506.13585) eq. 4 and 5.
        """
        ratio_N = given.log_ratio_N.detach().exp()
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        loss_N = -ratio_N.clamp(low, high) * given.advantages_N * given.log_probs_N
        return TokenLoss(loss_N, clip_metrics(ratio_N, low_N=ratio_N < low, high_N=ratio_N > high))


LOSS = CispoLoss
