"""A process on a pool that publishes weights as a trainer rank does, or reads them as an engine rank does.

`python -m tests.integration.pooled_rank DEVICE FOLDER NUM_ROWS FD...`; FD: descriptors of the pool. Verbs: publish VERSION (answers
with PublishedWeights in hex), offload, load and train, for a publisher; read HEX, which syncs a model and answers with the mean of its
weights and the number of chunks imported so far.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from tasuki.memory.allocator import NativeAllocator
from tasuki.memory.arena import Keep, totals
from tasuki.memory.pool import Identity, open_pool
from tasuki.memory.tags import MemoryTag
from tasuki.rollout.receive import WeightReceiver
from tasuki.transport.export import ExportMemory, WeightExport
from tasuki.transport.shards import Shard
from tasuki.v1 import weights_pb2
from tests.conftest import ENVIRONMENT

WEIGHTS, EXPORT = MemoryTag.WEIGHTS, MemoryTag.EXPORT
_COLUMNS = 1024


class Model(nn.Module):
    """An engine's model: one parameter, as in the checkpoint."""

    def __init__(self, num_rows: int, *, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_rows, _COLUMNS, device=device), requires_grad=False)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, loaded in weights:
            self.weight.data.copy_(loaded)


class Publisher:
    """A trainer rank that publishes copies, which leave with the weights. Every element is 1 before `train`."""

    def __init__(self, folder: Path, num_rows: int, *, device: str) -> None:
        self._allocator = NativeAllocator(tags=[WEIGHTS], device=device, keep={WEIGHTS: Keep.CONTENT})
        with self._allocator.region(WEIGHTS):
            self._weight = torch.ones(num_rows, _COLUMNS, device=device)
        shard = Shard("weight", tuple(self._weight.shape), (0, 0), self._weight)
        path, memory = folder / "w0.sock", ExportMemory(leaves=True)
        self._export = WeightExport([shard], rank=0, num_ranks=1, dtype=torch.float32, socket_path=path, memory=memory)
        assert self._export.copies is not None
        self._allocator.adopt(EXPORT, self._export.copies)

    def publish(self, version: int) -> weights_pb2.PublishedWeights:
        self._allocator.resume([EXPORT])
        self._export.publish(version)
        return weights_pb2.PublishedWeights(policy_version=version, boot_id="boot", handles=[self._export.handle()])

    def offload(self) -> None:
        with self._export.released():
            self._allocator.pause([WEIGHTS, EXPORT])

    def load(self) -> None:
        self._allocator.resume([WEIGHTS])
        self._export.withdraw()

    def train(self) -> None:
        self._weight.add_(1)


class PooledRank:
    """The process, as a test sees it."""

    def __init__(self, folder: Path, num_rows: int, *, device: str, fds: Sequence[int]) -> None:
        command = [sys.executable, "-m", __name__, device, str(folder), str(num_rows), *map(str, fds)]
        self._process = subprocess.Popen(
            command, env=ENVIRONMENT, pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, *words: object) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()

    def publish(self, version: int) -> weights_pb2.PublishedWeights:
        return weights_pb2.PublishedWeights.FromString(bytes.fromhex(self("publish", version)))

    def read(self, weights: weights_pb2.PublishedWeights) -> tuple[float, int]:
        """The mean of the weights after a sync, and the number of chunks imported so far."""
        mean, num_imported = self("read", weights.SerializeToString().hex()).split()
        return float(mean), int(num_imported)

    def come_back(self) -> None:
        for verb in ("offload", "load", "train"):
            assert self(verb) == "done"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def main(device: str, folder: str, num_rows: str, *fds: str) -> None:
    if device != "cpu":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # makes the context
    open_pool([int(fd) for fd in fds], device=device, identity=Identity.of(os.getpid()))
    publisher: Publisher | None = None
    receiver: WeightReceiver | None = None
    for line in sys.stdin:
        verb, *words = line.split()
        answer = "done"
        if verb == "read":
            receiver = receiver or WeightReceiver(Model(int(num_rows), device=device))
            receiver.receive(weights_pb2.PublishedWeights.FromString(bytes.fromhex(words[0])), import_timeout_s=20)
            answer = f"{receiver.model.weight.double().mean().item()} {totals().num_imported_chunks}"
        elif verb == "publish":
            publisher = publisher or Publisher(Path(folder), int(num_rows), device=device)
            answer = publisher.publish(int(words[0])).SerializeToString().hex()
        else:
            getattr(publisher, verb)()
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
