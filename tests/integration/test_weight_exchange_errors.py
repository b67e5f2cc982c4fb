"""Loaders that a plan cannot express, and planted errors: each is caught before the weights are served."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tasuki.rollout.receive import WeightReceiver
from tasuki.weights.imported_weights import import_weights
from tasuki.wire.errors import BadHandle, UnsupportedModel, WeightsCorrupt
from tests.integration.awkward_model import TENSORS, AwkwardModel, Trainer, assert_holds, expected, receive
from tests.models import poison
from tests.received import ReceivedPiece, check_received
from tests.slices import by_columns, by_rows, by_rows_and_columns


@pytest.fixture(params=[by_rows, by_columns, by_rows_and_columns])
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path, cut=request.param)
    yield trainer
    trainer.close()


def test_what_a_plan_cannot_express_is_named_and_loaded_by_the_model_itself(trainer: Trainer) -> None:
    model = AwkwardModel()
    receiver = WeightReceiver(model)
    poison(model)
    received = receive(receiver, trainer.publish(0))
    assert set(received.fallback_names) == {"transposed", "scale", "doubled"}
    assert_holds(model, expected(trainer))
    for tensor in trainer.tensors.values():
        tensor.add_(1)
    poison(model)
    receive(receiver, trainer.publish(1))
    assert_holds(model, expected(trainer))


def test_a_cast_that_loses_precision_is_refused_with_the_dtype_to_use(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, dtype=torch.float32)
    with pytest.raises(BadHandle, match="plain is published as torch.float32.*publish it as torch.bfloat16"):
        receive(WeightReceiver(AwkwardModel()), trainer.publish(0))
    trainer.close()


def test_moved_parameters_are_recorded_again(trainer: Trainer) -> None:
    model = AwkwardModel()
    receiver = WeightReceiver(model)
    receive(receiver, trainer.publish(0))
    first = receiver.plan
    receive(receiver, trainer.publish(1))
    assert receiver.plan is first
    model.plain.data = torch.full_like(model.plain, float("nan"))
    receive(receiver, trainer.publish(2))
    assert receiver.plan is not first
    assert_holds(model, expected(trainer))


def test_a_loader_that_leaves_rows_unwritten_is_caught_by_name(trainer: Trainer) -> None:
    class Forgetful(AwkwardModel):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((name, tensor) for name, tensor in weights if name != "plain")

    with pytest.raises(WeightsCorrupt, match="plain: of 32 elements 32 are not written") as caught:
        receive(WeightReceiver(Forgetful()), trainer.publish(0))
    assert caught.value.metadata["tensors"] == "plain"


def test_a_published_tensor_that_no_rank_reads_is_caught_by_name(trainer: Trainer) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.doubled = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, loaded in weights:
                if name == "doubled":
                    self.doubled.data.copy_(loaded)

    with pytest.raises(WeightsCorrupt, match="5 of 6 tensors.*plain: no engine rank reads it"):
        receive(WeightReceiver(Narrow()), trainer.publish(0))


def test_weights_that_the_engine_packs_for_itself_are_refused_by_name(trainer: Trainer) -> None:
    """SGLang packs weights for AMX after loading them."""
    model = AwkwardModel()
    model.add_module("gate", packed := nn.Module())
    packed.use_intel_amx_backend = True
    with pytest.raises(UnsupportedModel, match="weights of gate are packed for AMX") as caught:
        receive(WeightReceiver(model), trainer.publish(0))
    assert caught.value.metadata == {"module": "gate"}


@pytest.mark.parametrize("name", list(TENSORS))
def test_one_flipped_bit_in_published_memory_is_caught(trainer: Trainer, name: str) -> None:
    weights = trainer.publish(0)
    arena = trainer.exports[0]._arena
    index = [entry.name for entry in arena.manifest.entries].index(name)
    arena.tensors[index].view(torch.int16).flatten()[0] ^= 1
    with pytest.raises(WeightsCorrupt, match=f"1 of 6 tensors.*{name}: .*trainer rank 0 changed after it was published"):
        receive(WeightReceiver(AwkwardModel()), weights)


def test_differing_replicas_are_caught(trainer: Trainer) -> None:
    weights = trainer.publish(0)
    received = WeightReceiver(AwkwardModel()).receive(weights, import_timeout_s=2)
    pieces = [ReceivedPiece(rank, *entry) for rank in range(2) for entry in received.checksums]
    check_received(pieces, import_weights(weights, timeout_s=2))
    pieces[-1] = replace(pieces[-1], checksum=pieces[-1].checksum ^ 1)
    with pytest.raises(WeightsCorrupt, match=f"{pieces[-1].name}: engine ranks that hold the same slice differ") as caught:
        check_received(pieces, import_weights(weights, timeout_s=2))
    assert caught.value.metadata["rank"] == "1"


def test_a_missing_piece_of_zeros_is_caught(trainer: Trainer) -> None:
    """A piece of zeros has checksum zero, so only the count of elements can reveal it."""
    trainer.tensors["plain"].zero_()
    weights = trainer.publish(0)
    received = WeightReceiver(AwkwardModel()).receive(weights, import_timeout_s=2)
    pieces = [
        ReceivedPiece(0, name, at.narrowed(0, 0, 3) if name == "plain" else at, value) for name, at, value in received.checksums
    ]
    with pytest.raises(WeightsCorrupt, match="plain: of 24 elements 12 were not received"):
        check_received(pieces, import_weights(weights, timeout_s=2))
