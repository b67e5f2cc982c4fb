"""Trainer and engine ranks of the sync benchmarks, without an engine, a process each.

Trainer ranks hold fp32 masters on the first GPUs, and publish them as bfloat16 in an arena. Engine ranks receive them with WeightReceiver
into parameters of SGLang's shapes, through a plan recorded from a loader, and measure plain copies of the same bytes within a GPU, and from
the other GPUs while all ranks read.
"""

import argparse
import socket
import sys
from pathlib import Path

import torch

from tasuki.rollout.receive import WeightReceiver
from tasuki.v1 import weights_pb2
from tasuki.weights.export import WeightExport
from tools.bench.floors import Floors
from tools.bench.sync_ranks import answer
from tools.bench.sync_shapes import QWEN, QwenModel, random_shards

NUM_ROUNDS = 20
MODULE = "tools.bench.sync_gpu"
IMPORT_TIMEOUT_S = 20.0
# bfloat16 has 8 bits of mantissa, so every element changes.
CHANGE = 1.01


def trainer_rank(rank: int, num_ranks: int, model: str, folder: Path) -> None:
    """Publishes a version for every line it reads."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    shards = random_shards(QWEN[model], rank=rank, num_ranks=num_ranks, dtype=torch.float32, device=device)
    path = folder / f"weights-{rank}.sock"
    export = WeightExport(shards, rank=rank, num_ranks=num_ranks, dtype=torch.bfloat16, socket_path=path)
    fetched = _count_fetched(export)
    for line in sys.stdin:
        for shard in shards:
            shard.local.mul_(CHANGE)
        torch.cuda.synchronize()
        export.publish(int(line))
        answer(num_fetched=len(fetched), handle=export.handle())
    export.close()


def _count_fetched(export: WeightExport) -> list[None]:
    """Returns a list that grows by one at every fetch of the descriptors."""
    server, fetched = export._server, list[None]()
    send = server._send

    def send_and_count(peer: socket.socket) -> None:
        fetched.append(None)
        send(peer)

    server._send = send_and_count
    return fetched


def engine_rank(index: int, tp_size: int, model: str) -> None:
    """Receives the weights that a line names, or measures the ways to copy the same bytes. index: GPU; engines take neighbouring GPUs."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    parameters = QwenModel(QWEN[model], tp_rank=index % tp_size, tp_size=tp_size, dtype=torch.bfloat16, device=device)
    receiver = WeightReceiver(parameters)
    for line in sys.stdin:
        command, _, rest = line.strip().partition(" ")
        if command == "receive":
            weights = weights_pb2.PublishedWeights.FromString(bytes.fromhex(rest))
            answer(copied_bytes=receiver.receive(weights, import_timeout_s=IMPORT_TIMEOUT_S).copied_bytes)
        else:
            answer(**getattr(Floors(receiver, device), command)())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", nargs=4)
    parser.add_argument("--engine", nargs=3)
    args = parser.parse_args()
    if args.trainer:
        rank, num_ranks, model, folder = args.trainer
        return trainer_rank(int(rank), int(num_ranks), model, Path(folder))
    index, tp_size, model = args.engine
    return engine_rank(int(index), int(tp_size), model)


if __name__ == "__main__":
    main()
