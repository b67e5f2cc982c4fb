"""The LM head as a module that scores tokens, so that FSDP gathers its weight when it runs."""

from __future__ import annotations

from torch import Tensor, nn

from tasuki.algorithms.lm_head import token_log_probs


class LmHead(nn.Module):
    """Replaces a model's `lm_head`. The weight keeps its name and stays tied if it was.

    `weight` [V, H] is whole, in compute dtype, only inside `forward`. Untied, it is a separate FSDP2 group, gathered from this module's
    call until its backward; tied, it belongs to the root's group. Inputs keep their dtypes.
    """

    def __init__(self, projection: nn.Linear, *, softcap: float | None) -> None:
        super().__init__()
        assert projection.bias is None, "no supported family has one"
        self.weight, self.softcap = projection.weight, softcap

    def forward(self, hidden_NH: Tensor, token_ids_N: Tensor, *, temperature_N: Tensor) -> tuple[Tensor, Tensor]:
        """See token_log_probs."""
        return token_log_probs(hidden_NH, self.weight, token_ids_N, temperature_N=temperature_N, softcap=self.softcap)
