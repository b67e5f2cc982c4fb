"""DPPO: a trust region in probabilities rather than in their ratio."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tasuki.algorithms.loss import RatioInputs, RatioLoss, TokenLoss, clip_metrics
from tasuki.algorithms.setting import SettingError, check_number

if TYPE_CHECKING:
    from torch import Tensor

_THRESHOLDS = {"tv": 0.15, "kl": 0.05}
# Least probability of all other tokens together: float32 rounds smaller ones to 0.
_LEAST_REST = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class DppoLoss(RatioLoss):
    """DPPO: excludes tokens whose probability has moved too far from the old policy's and would move further (arXiv:2602.04879)."""

    divergence: Literal["tv", "kl"] = "tv"
    """Between old policy and policy, of the token against all others: total variation, or KL in nats."""
    threshold: float | None = None
    """Greatest divergence of a token that may move further; by default 0.15 for "tv" and 0.05 for "kl", as in verl."""
    max_ratio: float = 20.0
    """Cap of the importance ratio that weighs the policy gradient; at least 1."""

    def __post_init__(self) -> None:
        if self.divergence not in _THRESHOLDS:
            raise SettingError("divergence", f"is {self.divergence!r}; must be one of {', '.join(_THRESHOLDS)}")
        if self.threshold is not None:
            check_number("threshold", self.threshold, least=0.0)
        check_number("max_ratio", self.max_ratio, least=1.0)

    def token_loss(self, given: RatioInputs) -> TokenLoss:
        """-min(ratio, max_ratio) * advantage * log_prob with a constant ratio; 0 for excluded tokens.

        Source: DPPO (arXiv:2602.04879), binary TV and binary KL. With OldPolicy.ROLLOUT the trust region is around rollout's policy, as
        in the paper.
        """
        ratio_N, advantages_N = given.log_ratio_N.detach().exp(), given.advantages_N
        divergence_N = self._divergence(given.old_log_probs_N, given.log_probs_N.detach())
        threshold = _THRESHOLDS[self.divergence] if self.threshold is None else self.threshold
        is_far_N = divergence_N > threshold
        low_N, high_N = is_far_N & (ratio_N < 1.0) & (advantages_N < 0.0), is_far_N & (ratio_N > 1.0) & (advantages_N > 0.0)
        loss_N = -ratio_N.clamp(max=self.max_ratio) * advantages_N * given.log_probs_N
        metrics = {**clip_metrics(ratio_N, low_N=low_N, high_N=high_N), "divergence": divergence_N}
        return TokenLoss(loss_N.masked_fill(low_N | high_N, 0.0), metrics)

    def _divergence(self, old_log_probs_N: "Tensor", log_probs_N: "Tensor") -> "Tensor":
        """[N]: TV or KL(old policy || policy) of the Bernoulli variable whether the token is sampled."""
        old_N = old_log_probs_N.exp()
        if self.divergence == "tv":
            return (log_probs_N.exp() - old_N).abs()
        old_rest_N, rest_N = (-log_p_N.expm1().clamp(max=-_LEAST_REST) for log_p_N in (old_log_probs_N, log_probs_N))
        return old_N * (old_log_probs_N - log_probs_N) + old_rest_N * (old_rest_N / rest_N).log()


LOSS = DppoLoss
