"""One trainer rank of sync_peers.py: publishes as ours does, and hands the same weights out as other trainers do. Answers lines on stdin.

The weights are bfloat16 DTensors in rows over all ranks, which is what FSDP2 leaves. Whatever is sent is gathered whole by `full_tensor` on
every rank, and each rank gives a handle of its GPU's memory to the engine rank there: the way of verl and slime. checkpoint-engine's
way goes through the host's memory.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_engine.ps import ParameterServer
from loguru import logger
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ByRows

from tasuki.transport.device import device_uuid
from tasuki.transport.export import WeightExport
from tests.bench.peer_buckets import Buckets
from tests.bench.sync_gpu import CHANGE
from tests.bench.sync_ranks import answer
from tests.bench.sync_shapes import QWEN, random_shards

CHECKPOINT = "weights"


class PeerTrainer:
    """A rank with its weights; every method answers one line, and says what it costs the engine to take."""

    def __init__(self, *, rank: int, num_ranks: int, model: str, folder: Path, store_port: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._device = torch.device("cuda", rank)
        torch.cuda.set_device(self._device)
        store = f"file://{folder}/trainers"
        dist.init_process_group("nccl", init_method=store, rank=rank, world_size=num_ranks, device_id=self._device)
        monkey_patch_torch_reductions()
        self._shards = random_shards(QWEN[model], rank=rank, num_ranks=num_ranks, dtype=torch.bfloat16, device=self._device)
        path = folder / f"weights-{rank}.sock"
        self._export = WeightExport(self._shards, rank=rank, num_ranks=num_ranks, dtype=torch.bfloat16, socket_path=path)
        mesh = init_device_mesh("cuda", (num_ranks,))
        self._tensors = {shard.name: _dtensor(shard.local, shard.global_shape, mesh) for shard in self._shards}
        self._buckets = Buckets(self._tensors)
        self._places: dict[str, torch.Tensor] = {}
        # It takes its rank from there.
        os.environ["RANK"] = str(rank)
        self._server = ParameterServer(auto_pg=False, world_size=num_ranks, master_addr="127.0.0.1", master_port=store_port)

    def change(self, version: str) -> dict[str, Any]:
        """New values, published for our own sync."""
        for shard in self._shards:
            shard.local.mul_(CHANGE)
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._export.publish(int(version))
        publish_ms = 1e3 * (time.perf_counter() - start)
        gpu = {"uuid": device_uuid(self._device), "gpu": torch.cuda.get_device_name()}
        return {"handle": self._export.handle(), "publish_ms": publish_ms, **gpu}

    def bucket(self, num_bytes: str, index: str) -> dict[str, Any]:
        """Whole tensors of at most `num_bytes` (or one that is larger) in one new tensor, with its handle."""
        return self._buckets.send(int(num_bytes), int(index))

    def tensors(self) -> dict[str, Any]:
        """All whole tensors, each with a handle."""
        return self._buckets.send_each()

    def make_places(self) -> dict[str, Any]:
        """Memory for all tensors whole, as if it were the engine's own."""
        self._places = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device) for name, tensor in self._tensors.items()
        }
        torch.cuda.synchronize()
        return {}

    def in_place(self) -> dict[str, Any]:
        """NCCL's all-gather of every tensor into its place."""
        for name, place in self._places.items():
            dist.all_gather_into_tensor(place, self._tensors[name].to_local())
        torch.cuda.synchronize()
        return {}

    def check_places(self) -> dict[str, Any]:
        """Compares them with what `full_tensor` gathers, and gives them up."""
        is_equal = all(torch.equal(place, self._buckets.whole(name)) for name, place in self._places.items())
        self._places.clear()
        return {"is_equal": is_equal}

    def checkpoint_engine(self, bucket_gib: str) -> dict[str, Any]:
        """Each rank copies its part of the whole tensors to the host and hands it out to all from there.

        Answers twice: where engines find the buckets, with the milliseconds that it took until then, and when they have all.
        """
        os.environ["PS_MAX_BUCKET_SIZE_GB"] = bucket_gib
        start = time.perf_counter()
        mine = dict(self._contiguous_part())
        self._server.register_checkpoint(CHECKPOINT, named_tensors=mine, use_shared_memory_pool=True)
        mine.clear()
        self._server.gather_metas(CHECKPOINT)
        host_ms = 1e3 * (time.perf_counter() - start)
        self._server.update(CHECKPOINT, lambda paths: answer(socket_paths=dict(paths), host_ms=host_ms))
        self._server.unregister_checkpoint(CHECKPOINT)
        return {}

    def forget_sent(self) -> dict[str, Any]:
        """Gives up what was handed out last; torch keeps the memory."""
        self._buckets.forget_sent()
        return {}

    def trim(self) -> dict[str, Any]:
        """Gives back what torch keeps for the next time."""
        self.forget_sent()
        torch.cuda.empty_cache()
        return {}

    def close(self) -> None:
        self._export.close()
        dist.destroy_process_group()

    def _contiguous_part(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Neighbours, as in the files of a checkpoint, about as many bytes on each rank. All ranks gather all."""
        total, offset = sum(tensor.nbytes for tensor in self._tensors.values()), 0
        for name, tensor in self._tensors.items():
            whole = self._buckets.whole(name)
            if offset * self._num_ranks // total == self._rank:
                yield name, whole
            offset += tensor.nbytes


def _dtensor(local: torch.Tensor, shape: tuple[int, ...], mesh: Any) -> DTensor:
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [ByRows(0)], run_check=False, shape=torch.Size(shape), stride=strides)


def main() -> None:
    rank, num_ranks, model, folder, store_port = sys.argv[1:]
    # Answers alone go where the parent reads; libraries print to stderr.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logger.remove()
    logger.add(sys.stderr, level="WARNING")  # checkpoint-engine's
    trainer = PeerTrainer(
        rank=int(rank), num_ranks=int(num_ranks), model=model, folder=Path(folder), store_port=int(store_port)
    )
    for line in sys.stdin:
        command, *arguments = line.split()
        answer(**getattr(trainer, command)(*arguments))
    trainer.close()


if __name__ == "__main__":
    main()
