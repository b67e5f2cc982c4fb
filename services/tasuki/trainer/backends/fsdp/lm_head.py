"""The vocabulary projection as a module that scores tokens, so that FSDP gathers its weight when it runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tasuki.algorithms.token_log_probs import token_log_probs


class LmHead(nn.Module):
    """Takes the place of a model's `lm_head`. The weight keeps its name, and stays tied if it was.

    `weight` [V, H] is whole, in compute dtype, inside `forward` only: untied it is an FSDP2 group by itself, gathered when this module is
    called and until its backward; tied it is in the root's group. Inputs keep their dtypes.
    """

    def __init__(self, projection: nn.Linear, *, softcap: float | None) -> None:
        super().__init__()
        self.weight, self.softcap = projection.weight, softcap

    def forward(self, hidden_NH: Tensor, token_ids_N: Tensor, *, temperature_N: Tensor) -> tuple[Tensor, Tensor]:
        """See token_log_probs."""
        logits_NV = linear(hidden_NH, self.weight)
        if self.softcap is not None:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        return token_log_probs(logits_NV, token_ids_N, temperature_N=temperature_N)
