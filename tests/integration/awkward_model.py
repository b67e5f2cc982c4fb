"""Two trainer ranks with a few small tensors, and a model whose loader does things that copy plans cannot express."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tasuki.rollout.receive import Received, WeightReceiver
from tasuki.v1 import weights_pb2
from tasuki.weights.export import Shard, WeightExport
from tasuki.weights.imported_weights import import_weights
from tests.received import ReceivedPiece, check_received
from tests.slices import Cut, by_rows, part_of

TENSORS = {"plain": (6, 4), "transposed": (4, 6), "scale": (1,), "left": (3, 2), "right": (3, 2), "doubled": (5,)}


class AwkwardModel(nn.Module):
    """Loads one tensor in a way that plans support, and the others by transposed copy, value, concatenation and arithmetic."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        shapes = {"plain": (8, 4), "transposed": (6, 4), "scale": (1,), "joined": (3, 4), "doubled": (5,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        halves = {}
        for name, loaded in weights:
            if name == "plain":
                self.plain.data[:6].copy_(loaded)
                self.plain.data[6:].fill_(0)
            elif name == "transposed":
                self.transposed.data.copy_(loaded.t().contiguous())
            elif name == "scale":
                self.scale.data.fill_(loaded.item())
            elif name == "doubled":
                self.doubled.data.copy_(loaded * 2)
            else:
                halves[name] = loaded
        if halves:
            self.joined.data.copy_(torch.cat([halves["left"], halves["right"]], dim=1))


class Trainer:
    """Two ranks that publish uneven shares of TENSORS."""

    def __init__(
        self, folder: Path, *, boot_id: str = "boot", dtype: torch.dtype = torch.bfloat16, seed: int = 0, cut: Cut = by_rows
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {name: torch.randn(shape, generator=generator) for name, shape in TENSORS.items()}
        self.boot_id = boot_id
        self.exports = []
        for rank in range(2):
            shards = []
            for name, tensor in self.tensors.items():
                box = cut(tuple(tensor.shape), rank, 2)
                if box.numel:
                    shards.append(Shard(name, tuple(tensor.shape), box.offsets, part_of(tensor, box)))
            path = folder / f"{boot_id}-{rank}.sock"
            self.exports.append(WeightExport(shards, rank=rank, num_ranks=2, dtype=dtype, socket_path=path))

    def publish(self, version: int) -> weights_pb2.PublishedWeights:
        for export in self.exports:
            export.publish(version)
        return self.handles(version)

    def handles(self, version: int) -> weights_pb2.PublishedWeights:
        handles = [export.handle() for export in self.exports]
        return weights_pb2.PublishedWeights(policy_version=version, boot_id=self.boot_id, handles=handles)

    def close(self) -> None:
        for export in self.exports:
            export.close()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.close()


def receive(receiver: WeightReceiver, weights: weights_pb2.PublishedWeights) -> Received:
    """Syncs one engine rank as the service does: copies, then compares with the published checksums."""
    received = receiver.receive(weights, import_timeout_s=2)
    pieces = [ReceivedPiece(0, *entry) for entry in received.checksums]
    check_received(pieces, import_weights(weights, timeout_s=2))
    return received


def expected(trainer: Trainer, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Returns the parameters that the model's own loader makes from the published values."""
    model = AwkwardModel(dtype)
    model.load_weights((name, tensor.bfloat16()) for name, tensor in trainer.tensors.items())
    return dict(model.named_parameters())


def assert_holds(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name]), name
