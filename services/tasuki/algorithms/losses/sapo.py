"""SAPO: a soft gate around ratio 1."""

from dataclasses import dataclass

from tasuki.algorithms.loss import RatioInputs, RatioLoss, TokenLoss, clip_metrics
from tasuki.algorithms.setting import check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoLoss(RatioLoss):
    """SAPO: a sigmoid around ratio 1 instead of a clip, so that the gradient fades rather than ends (arXiv:2511.20347).

    Higher temperatures damp sooner; by default that of negative advantages is higher.
    """

    temperature_positive: float = 1.0
    """Steepness of the gate for positive advantages."""
    temperature_negative: float = 1.05
    """Steepness of the gate for the other advantages."""

    def __post_init__(self) -> None:
        check_number("temperature_positive", self.temperature_positive, above=0.0)
        check_number("temperature_negative", self.temperature_negative, above=0.0)

    def token_loss(self, given: RatioInputs) -> TokenLoss:
        """-advantage * sigmoid(t * (ratio - 1)) * 4 / t, whose slope at ratio 1 is that of the unclipped loss. It never clips.

        Source: Soft Adaptive Policy Optimization (arXiv:2511.20347).
        """
        ratio_N = given.log_ratio_N.exp()
        negative_N = ratio_N.new_full(ratio_N.shape, self.temperature_negative)
        temperature_N = negative_N.masked_fill(given.advantages_N > 0.0, self.temperature_positive)
        soft_N = (temperature_N * (ratio_N - 1.0)).sigmoid() * (4.0 / temperature_N)
        never_N = ratio_N < 0.0
        return TokenLoss(-given.advantages_N * soft_N, clip_metrics(ratio_N.detach(), low_N=never_N, high_N=never_N))


LOSS = SapoLoss
