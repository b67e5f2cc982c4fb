"""GSPO: one clipped ratio a sequence. Shape suffixes: N tokens, S samples."""

from dataclasses import dataclass

from tasuki.algorithms.loss import MAX_LOG_RATIO, RatioInputs, RatioLoss, TokenLoss, clipped
from tasuki.algorithms.setting import check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoLoss(RatioLoss):
    """GSPO: one length-normalized ratio per sequence (arXiv:2507.18071 eq. 5). Clip bounds from its section 5.1."""

    clip_low: float = 3e-4
    """The ratio's lower bound is 1 - this."""
    clip_high: float = 4e-4
    """The ratio's upper bound is 1 + this."""

    def __post_init__(self) -> None:
        check_number("clip_low", self.clip_low, least=0.0, most=1.0)
        check_number("clip_high", self.clip_high, least=0.0)

    def token_loss(self, given: RatioInputs) -> TokenLoss:
        """GSPO in its token form: every token of a sequence has the ratio s = exp(mean of log_ratio over the counted tokens).

        Each token's own log-prob carries the gradient, s * grad(log_prob). With SEQUENCE_MEAN_TOKEN_MEAN, the paper's aggregation, the
        gradient equals that of the sequence form.
        Source: GSPO (arXiv:2507.18071) eq. 5 and 7 (sequence form), eq. 13 and 14 (token form).
        """
        mean_N = given.batch.counted_means(given.log_ratio_N.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio_N = (mean_N.to(given.log_ratio_N.dtype) + (given.log_probs_N - given.log_probs_N.detach())).exp()
        return clipped(ratio_N, given.advantages_N, clip_low=self.clip_low, clip_high=self.clip_high)


LOSS = GspoLoss
