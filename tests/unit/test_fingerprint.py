"""Every way in which a parameter can move is detected."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from tasuki.rollout.receive import Fingerprint


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4, bias=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...


def move(model: Model) -> None:
    model.first.weight.data = model.first.weight.data.clone()


def reshape(model: Model) -> None:
    model.first.weight.data = model.first.weight.data.view(2, 8)


def transpose(model: Model) -> None:
    model.first.weight.data = model.first.weight.data.t()


def change_dtype(model: Model) -> None:
    model.first.weight.data = model.first.weight.data.view(torch.int32)


def replace(model: Model) -> None:
    model.first.weight = nn.Parameter(model.first.weight.data)


def replace_module(model: Model) -> None:
    model.second[0] = nn.Linear(4, 4, bias=False)


def add(model: Model) -> None:
    model.second.register_parameter("extra", nn.Parameter(torch.zeros(1)))


def remove(model: Model) -> None:
    model.first.register_parameter("bias", None)


@pytest.mark.parametrize("change", [move, reshape, transpose, change_dtype, replace, replace_module, add, remove])
def test_a_parameter_that_is_not_where_it_was_is_noticed(change: Callable[[Model], None]) -> None:
    model = Model().requires_grad_(False)
    fingerprint = Fingerprint(model)
    for parameter in model.parameters():
        parameter.fill_(1)
    assert fingerprint.is_current()
    change(model)
    assert not fingerprint.is_current()
    assert Fingerprint(model).is_current()


def test_memory_taken_from_held_parameters_is_noticed() -> None:
    model = Model().requires_grad_(False)
    fingerprint = Fingerprint(model)
    move(model)
    assert fingerprint.is_memory_held()
    model.second[0].weight.untyped_storage().resize_(0)
    assert not fingerprint.is_memory_held()
