"""The critic's squared error."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasuki.algorithms.loss import CriticLoss, TokenLoss
from tasuki.algorithms.setting import check_number

if TYPE_CHECKING:
    from torch import Tensor

    from tasuki.algorithms.batch import LossBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss(CriticLoss):
    """PPO's clipped value loss (arXiv:2005.12729 sec. 3)."""

    clip: float | None = None
    """Maximum distance of a value from its old one before its loss is clipped; by default plain squared error (arXiv:2006.05990)."""

    def __post_init__(self) -> None:
        if self.clip is not None:
            check_number("clip", self.clip, above=0.0)

    @property
    def needs_old_values(self) -> bool:
        return self.clip is not None

    def token_loss(self, values_N: "Tensor", batch: "LossBatch") -> TokenLoss:
        """Half the squared error of each token's value, the larger of the clipped and unclipped error.

        Source: PPO's code as described in "Implementation matters" (arXiv:2005.12729) sec. 3, item 1.
        """
        assert batch.returns_N is not None
        error_N = (values_N - batch.returns_N).square()
        metrics = {"value": values_N, "return": batch.returns_N, "squared_error": error_N}
        if self.clip is not None:
            assert batch.values_N is not None
            clipped_N = values_N.clamp(batch.values_N - self.clip, batch.values_N + self.clip)
            clipped_error_N = (clipped_N - batch.returns_N).square()
            metrics["clip_fraction"] = clipped_error_N > error_N
            error_N = error_N.maximum(clipped_error_N)
        return TokenLoss(0.5 * error_N, metrics)


LOSS = ValueLoss
