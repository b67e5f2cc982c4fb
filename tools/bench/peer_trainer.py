"""One trainer rank of sync_peers.py: publishes as ours does, and sends the same weights as other trainers do. Answers lines on stdin.

The weights are bfloat16 DTensors, sharded by rows over all ranks, as FSDP2 leaves them. `full_tensor` gathers every tensor on every rank,
and each rank gives the engine rank on its GPU a handle of that memory, as verl and slime do. checkpoint-engine goes through host memory.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_engine.ps import ParameterServer
from loguru import logger
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ByRows

from tasuki.weights.export import WeightExport
from tasuki.weights.weight_arena import device_uuid
from tools.bench.sync_gpu import CHANGE
from tools.bench.sync_ranks import answer
from tools.bench.sync_shapes import QWEN, random_shards

CHECKPOINT = "weights"


class Buckets:
    """Whole weights in flattened buckets, sent to SGLang as CUDA IPC handles, as verl and slime do."""

    def __init__(self, tensors: Mapping[str, DTensor]) -> None:
        self._tensors = tensors
        self._sent: Any = None

    def send(self, num_bytes: int, index: int) -> dict[str, Any]:
        """Packs whole tensors of at most `num_bytes` (or one larger tensor) into a new tensor, and returns its handle."""
        torch.cuda.ipc_collect()  # of memory that engines have closed
        buckets = self._split(num_bytes)
        bucket = FlattenedTensorBucket(named_tensors=[(name, self.whole(name)) for name in buckets[index]])
        content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        self._sent = bucket
        payload = MultiprocessingSerializer.serialize(content, output_str=True)
        return {"payload": payload, "num_handles": 1, "num_buckets": len(buckets)}

    def send_each(self) -> dict[str, Any]:
        """Gathers all tensors; one handle per tensor."""
        torch.cuda.ipc_collect()  # of memory that engines have closed
        self._sent = [(name, self.whole(name)) for name in self._tensors]
        return {"payload": MultiprocessingSerializer.serialize(self._sent, output_str=True), "num_handles": len(self._sent)}

    def whole(self, name: str) -> torch.Tensor:
        return self._tensors[name].full_tensor()

    def forget_sent(self) -> None:
        """Drops the last tensors sent; torch keeps their memory cached."""
        self._sent = None
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()  # of memory that engines have closed

    def _split(self, num_bytes: int) -> Sequence[Sequence[str]]:
        buckets: list[list[str]] = [[]]
        size = 0
        for name, tensor in self._tensors.items():
            tensor_bytes = tensor.nbytes
            if buckets[-1] and size + tensor_bytes > num_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(name)
            size += tensor_bytes
        return buckets


class PeerTrainer:
    """A rank with its weights; every method answers one line with the cost for the engine."""

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
        # It reads its rank from the environment.
        os.environ["RANK"] = str(rank)
        self._server = ParameterServer(auto_pg=False, world_size=num_ranks, master_addr="127.0.0.1", master_port=store_port)

    def change(self, version: str) -> dict[str, Any]:
        """Changes the values and publishes them for our sync."""
        for shard in self._shards:
            shard.local.mul_(CHANGE)
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._export.publish(int(version))
        publish_ms = 1e3 * (time.perf_counter() - start)
        gpu = {"uuid": device_uuid(self._device), "gpu": torch.cuda.get_device_name()}
        return {"handle": self._export.handle(), "publish_ms": publish_ms, **gpu}

    def bucket(self, num_bytes: str, index: str) -> dict[str, Any]:
        """Packs whole tensors of at most `num_bytes` (or one larger tensor) into a new tensor, and returns its handle."""
        return self._buckets.send(int(num_bytes), int(index))

    def tensors(self) -> dict[str, Any]:
        """Gathers all tensors; one handle per tensor."""
        return self._buckets.send_each()

    def make_places(self) -> dict[str, Any]:
        """Allocates memory for all whole tensors, as an engine would."""
        self._places = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device) for name, tensor in self._tensors.items()
        }
        torch.cuda.synchronize()
        return {}

    def in_place(self) -> dict[str, Any]:
        """Runs NCCL's all-gather of every tensor into its place."""
        for name, place in self._places.items():
            dist.all_gather_into_tensor(place, self._tensors[name].to_local())
        torch.cuda.synchronize()
        return {}

    def check_places(self) -> dict[str, Any]:
        """Compares the gathered tensors with those of `full_tensor`, then frees them."""
        is_equal = all(torch.equal(place, self._buckets.whole(name)) for name, place in self._places.items())
        self._places.clear()
        return {"is_equal": is_equal}

    def checkpoint_engine(self, bucket_gib: str) -> dict[str, Any]:
        """Copies this rank's share of the whole tensors to the host and serves it to all ranks.

        Answers twice: first where engines find the buckets, with the milliseconds so far, and again when all engines have them.
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
        """Drops the last tensors sent; torch keeps their memory cached."""
        self._buckets.forget_sent()
        return {}

    def trim(self) -> dict[str, Any]:
        """Returns torch's cached memory to the driver."""
        self.forget_sent()
        torch.cuda.empty_cache()
        return {}

    def close(self) -> None:
        self._export.close()
        dist.destroy_process_group()

    def _contiguous_part(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Splits neighbouring tensors, as in checkpoint files, into shares of about equal bytes per rank. All ranks gather all."""
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
    # The parent reads stdout, so only answers may go there; libraries print to stderr.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logger.remove()
    logger.add(sys.stderr, level="WARNING")  # of checkpoint-engine
    trainer = PeerTrainer(
        rank=int(rank), num_ranks=int(num_ranks), model=model, folder=Path(folder), store_port=int(store_port)
    )
    for line in sys.stdin:
        command, *arguments = line.split()
        answer(**getattr(trainer, command)(*arguments))
    trainer.close()


if __name__ == "__main__":
    main()
