"""Recording of a loader's copies."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from tasuki.rollout.record import record_plan
from tasuki.weights.plan import Constant, whole


class PaddingRank(nn.Module):
    """The last of many ranks, whose part of the vocabulary is all padding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 2), torch.nan), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, loaded in weights:
            rows = loaded.narrow(0, loaded.shape[0], 0)
            self.weight.data[: rows.shape[0]].copy_(rows)
            self.weight.data[rows.shape[0] :].fill_(0)


class Vocabulary:
    def layout(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"embed": ((6, 2), torch.float32)}

    def gathered(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} is no fallback")


def test_a_rank_that_holds_no_row_of_a_tensor_needs_no_fallback_for_it() -> None:
    plan = record_plan(PaddingRank(), Vocabulary())
    assert (plan.pieces, plan.fallback_names) == ((), ())
    assert plan.constants == (Constant("weight", whole((4, 2)), 0.0),)
