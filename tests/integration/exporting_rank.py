"""A trainer rank that publishes from its arenas, which stay or leave, and an engine's model for the published tensors."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from tasuki.memory.arena import Keep, NativeAllocator
from tasuki.v1 import weights_pb2
from tasuki.weights.checksum import checksum
from tasuki.weights.export import ExportMemory, Place, Shard, WeightExport
from tasuki.wire.stages import MemoryTag
from tests.slices import by_rows

WEIGHTS, EXPORT = MemoryTag.WEIGHTS, MemoryTag.EXPORT
MIB = 1 << 20
# On a CPU the small one is too small for the arena, so it is always a copy.
SHAPES = {"large": (512, 1024), "odd": (999, 77), "small": (40,)}


class Engine(nn.Module):
    """A model with every tensor as in the checkpoint, and the rows of `large` twice."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in {**SHAPES, "again": SHAPES["large"]}.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            self._parameters[name].data.copy_(loaded)
            if name == "large":
                self.again.data.copy_(loaded)


class Replacing:
    """One shard that is written by a function. look: called before and after."""

    def __init__(self, name: str, write: Callable[[torch.Tensor], object], *, look: Callable[[], None] = lambda: None) -> None:
        self._name, self._write, self._look = name, write, look
        self.names = frozenset([name])

    def fill(self, places: Mapping[str, Place]) -> Mapping[str, int]:
        (held, where) = places[self._name]
        self._look()
        self._write(held)
        self._look()
        return {self._name: checksum(held, where)}


class TrainerRank:
    """One rank's tensors in the arena of `weights`, beside unrelated tensors, and their export."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        published: torch.dtype,
        in_place: bool,
        leaves: bool,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self.keep = Keep.CHUNKS if in_place and not leaves else Keep.CONTENT
        self.allocator = NativeAllocator(tags=[WEIGHTS], device="cpu", keep={WEIGHTS: self.keep})
        self.leaves, self.published = leaves, published
        shards = []
        with self.allocator.region(WEIGHTS):
            self.before = torch.full((3 * MIB,), 7, dtype=torch.uint8)
            for name, shape in SHAPES.items():
                box = by_rows(shape, rank, num_ranks)
                shards.append(Shard(name, shape, box.offsets, torch.randn(box.sizes).to(dtype)))
            self.after = torch.full((20 * MIB,), 7, dtype=torch.uint8)
        self.tensors = {shard.name: shard.local for shard in shards}
        memory = ExportMemory(self.allocator.arena(WEIGHTS) if in_place else None, leaves=leaves)
        self.export = WeightExport(
            shards, rank=rank, num_ranks=num_ranks, dtype=published, socket_path=folder / f"w{rank}.sock", memory=memory
        )

        assert self.export.copies is not None
        self.allocator.adopt(EXPORT, self.export.copies)

    def publish(self, version: int) -> weights_pb2.PublishedWeights:
        self.allocator.resume([EXPORT])
        self.export.publish(version)
        return weights_pb2.PublishedWeights(policy_version=version, boot_id="boot", handles=[self.export.handle()])

    def offload(self) -> int:
        if not self.leaves:
            return self.allocator.pause([WEIGHTS])
        with self.export.released():
            return self.allocator.pause([WEIGHTS, EXPORT])

    def load(self) -> None:
        self.allocator.resume([WEIGHTS])
        self.export.withdraw()

    def train(self) -> None:
        for tensor in self.tensors.values():
            tensor.add_(1)

    def close(self) -> None:
        self.export.close()
