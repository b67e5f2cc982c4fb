"""Recording of a loader's copies."""

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from sglang.srt.layers.utils.common import pad_or_narrow_weight
from torch import nn

from tasuki.rollout.record import EngineModel, PublishedTensors, complete_plan, record
from tasuki.weights.plan import Constant, CopyPlan, Slice, whole


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


class JoinedRows(nn.Module):
    """Loads two tensors as one, whole, and two others of which it takes a part."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.full((5, 2), torch.nan), requires_grad=False)
        self.part = nn.Parameter(torch.full((2, 2), torch.nan), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        if "a" in given:
            self.whole.data.copy_(torch.cat([given["a"], given["b"]]))
        if "c" in given:
            self.part.data.copy_(torch.cat([given["c"], given["d"]], dim=0)[2:4])


class PaddedColumns(nn.Module):
    """SGLang's padding of a rank's columns on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6, 4), torch.nan), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, loaded in weights:
            self.weight.data.copy_(pad_or_narrow_weight(loaded, 1, 1, 4))


class DerivedScale(nn.Module):
    """A norm that adds one to its weight when that is loaded, by reading the parameter back, and a plain tensor beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.plain = (nn.Parameter(torch.full((rows, 2), torch.nan), requires_grad=False) for rows in (2, 3))
        self.derived = torch.zeros(2, 2)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            if name == "a":
                self.norm.data.copy_(loaded)
                self.derived.copy_(self.norm.data).add_(1.0)
            elif name == "b":
                self.plain.data[:2].copy_(loaded[:2])
                self.plain.data[2:].copy_(loaded[2:])


class Published:
    values: ClassVar = {name: torch.randn(rows, 2) for name, rows in (("a", 2), ("b", 3), ("c", 2), ("d", 3))}

    def layout(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(value.shape), value.dtype) for name, value in self.values.items()}

    def gathered(self, name: str) -> torch.Tensor:
        return self.values[name]


class Vocabulary:
    def layout(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"embed": ((6, 2), torch.float32)}

    def gathered(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} is no fallback")


def record_plan(model: EngineModel, published: PublishedTensors) -> CopyPlan:
    return complete_plan(record(model, published.layout()), model, published)


def test_a_rank_that_holds_no_row_of_a_tensor_needs_no_fallback_for_it() -> None:
    plan = record_plan(PaddingRank(), Vocabulary())
    assert (plan.pieces, plan.fallback_names) == ((), ())
    assert plan.constants == (Constant("weight", whole((4, 2)), 0.0),)


def test_padding_of_a_loaded_tensor_is_a_constant_and_the_rest_is_copied() -> None:
    plan = record_plan(PaddedColumns(), Vocabulary())
    assert [(piece.source, piece.destination) for piece in plan.pieces] == [
        (Slice(1, (6, 1), (2, 1)), Slice(0, (6, 1), (4, 1)))
    ]
    assert plan.constants == (Constant("weight", Slice(1, (6, 3), (4, 1)), 0.0),)
    assert plan.fallback_names == ()


def test_tensors_that_are_loaded_as_one_are_copied_and_a_part_of_both_is_a_fallback() -> None:
    model = JoinedRows()
    plan = record_plan(model, Published())
    assert [(piece.name, piece.parameter, piece.destination.offset, piece.destination.shape) for piece in plan.pieces] == [
        ("a", "whole", 0, (2, 2)),
        ("b", "whole", 4, (3, 2)),
    ]
    assert plan.fallback_names == ("c", "d")
    assert torch.equal(model.part, Published.values["d"][:2])


def test_a_tensor_whose_parameter_the_loader_reads_back_is_a_fallback() -> None:
    model = DerivedScale()
    plan = record_plan(model, Published())
    assert plan.fallback_names == ("a",)
    assert torch.equal(model.derived, Published.values["a"] + 1)
    assert {piece.name for piece in plan.pieces} == {"b"}
