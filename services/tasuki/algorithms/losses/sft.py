"""Supervised fine-tuning."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasuki.algorithms.loss import PolicyLoss, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

    from tasuki.algorithms.batch import LossBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SftLoss(PolicyLoss):
    """Supervised fine-tuning: the negative log-probability of each counted token."""

    def token_loss(self, log_probs_N: "Tensor", batch: "LossBatch") -> TokenLoss:
        return TokenLoss(-log_probs_N)


LOSS = SftLoss
