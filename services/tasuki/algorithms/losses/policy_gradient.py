"""REINFORCE."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tasuki.algorithms.loss import PolicyLoss, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

    from tasuki.algorithms.batch import LossBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradientLoss(PolicyLoss):
    """REINFORCE: -advantage * log-probability, without ratio or clip."""

    has_advantages: ClassVar[bool] = True

    def token_loss(self, log_probs_N: "Tensor", batch: "LossBatch") -> TokenLoss:
        """The loss whose gradient is the policy gradient.

        Source: Williams (1992), "Simple statistical gradient-following algorithms", eq. 11.
        """
        assert batch.advantages_N is not None
        return TokenLoss(-batch.advantages_N * log_probs_N)


LOSS = PolicyGradientLoss
