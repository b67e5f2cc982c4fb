"""Both ends of a weight exchange on GPUs: trainer ranks in this process, and tensor-parallel ranks of a model that receive."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tasuki.memory.arena import Keep, NativeAllocator
from tasuki.rollout.receive import Received, WeightReceiver
from tasuki.v1 import weights_pb2
from tasuki.weights.export import ExportMemory, Shard, WeightExport
from tasuki.weights.imported_weights import import_weights
from tasuki.wire.stages import MemoryTag
from tests.received import ReceivedPiece, check_received
from tools.bench.sync_shapes import QWEN, QwenModel, random_shards

WEIGHTS, EXPORT = MemoryTag.WEIGHTS, MemoryTag.EXPORT


TINY = QWEN["tiny"]


class TrainerRank:
    """A rank's shards in the arena of `weights` on one GPU, beside unrelated memory, and their export."""

    def __init__(
        self, folder: Path, *, gpu: int, dtype: torch.dtype, in_place: bool, leaves: bool, rank: int = 0, num_ranks: int = 1
    ) -> None:
        device = torch.device("cuda", gpu)
        keep = Keep.CHUNKS if in_place and not leaves else Keep.CONTENT
        self.allocator = NativeAllocator(tags=[WEIGHTS], device=f"cuda:{gpu}", keep={WEIGHTS: keep})
        self.leaves = leaves
        with torch.cuda.device(device), self.allocator.region(WEIGHTS):
            self.shards = random_shards(TINY, rank=rank, num_ranks=num_ranks, dtype=dtype, device=device)
            self.other = torch.full((1 << 30,), 7, dtype=torch.uint8, device=device)
        self.export = WeightExport(
            self.shards,
            rank=rank,
            num_ranks=num_ranks,
            dtype=torch.bfloat16,
            socket_path=folder / f"w{rank}.sock",
            memory=ExportMemory(self.allocator.arena(WEIGHTS) if in_place else None, leaves=leaves),
        )
        if self.export.copies is not None:
            self.allocator.adopt(EXPORT, self.export.copies)

    def publish(self, version: int) -> weights_pb2.WeightHandle:
        self.allocator.resume([tag for tag in (EXPORT,) if tag in self.allocator.tags])
        self.export.publish(version)
        return self.export.handle()

    def offload(self) -> int:
        if not self.leaves:
            return self.allocator.pause([WEIGHTS])
        with self.export.released():
            return self.allocator.pause(self.allocator.tags)

    def load(self) -> None:
        self.allocator.resume([WEIGHTS])
        self.export.withdraw()

    def train(self) -> None:
        for shard in self.shards:
            shard.local.add_(1)

    def close(self) -> None:
        self.export.close()
        self.shards.clear()
        del self.export, self.other
        self.allocator.close()


def published(version: int, handles: Sequence[weights_pb2.WeightHandle]) -> weights_pb2.PublishedWeights:
    return weights_pb2.PublishedWeights(policy_version=version, boot_id="boot", handles=handles)


def checkpoint(shards: Sequence[Sequence[Shard]], device: torch.device) -> list[tuple[str, torch.Tensor]]:
    """Assembles whole bfloat16 tensors from the ranks' shards."""
    return [
        (first.name, torch.cat([rank[index].local.bfloat16().to(device) for rank in shards]))
        for index, first in enumerate(shards[0])
    ]


def engines(gpus: Sequence[int]) -> list[WeightReceiver]:
    """Makes tensor-parallel ranks, one on each GPU of the list."""
    sizes = {"tp_size": len(gpus), "dtype": torch.bfloat16}
    devices = [torch.device("cuda", gpu) for gpu in gpus]
    return [WeightReceiver(QwenModel(TINY, tp_rank=rank, device=device, **sizes)) for rank, device in enumerate(devices)]


def receive(receivers: Sequence[WeightReceiver], weights: weights_pb2.PublishedWeights) -> list[Received]:
    """Syncs tensor-parallel ranks, and compares their sums with the published ones."""
    front = import_weights(weights, timeout_s=5)
    received = [receiver.receive(weights, import_timeout_s=5) for receiver in receivers]
    pieces = [ReceivedPiece(rank, *sums) for rank, one in enumerate(received) for sums in one.checksums]
    check_received(pieces, front)
    front.close()
    return received


def assert_hold(receivers: Sequence[WeightReceiver], tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Checks, bit for bit, the values that the model's own loader makes of the tensors."""
    for rank, receiver in enumerate(receivers):
        device = next(iter(receiver.model.named_parameters()))[1].device
        loaded = QwenModel(TINY, tp_rank=rank, tp_size=len(receivers), dtype=torch.bfloat16, device=device)
        loaded.load_weights([(name, tensor.to(device)) for name, tensor in tensors])
        for (name, held), (_, wanted) in zip(receiver.model.named_parameters(), loaded.named_parameters(), strict=True):
            assert torch.equal(held.data.view(torch.int16), wanted.data.view(torch.int16)), name
