"""Weights published under legacy CUDA IPC handles, on real GPUs.

Needs `make native`, a CUDA GPU and no network.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tasuki.v1 import weights_pb2
from tasuki.weights.chunk_memory import descriptor_problem
from tasuki.weights.export import ExportMemory, WeightExport
from tasuki.weights.fd_socket import FdServer
from tasuki.weights.imported_weights import import_weights
from tasuki.weights.manifest import digest_of, to_proto
from tasuki.wire.errors import BadHandle
from tests.gpu.weight_exchange import TINY, engines, published, receive
from tools.bench.sync_shapes import random_shards

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


GPU = torch.device("cuda:0")


class IpcTrainer:
    """A trainer rank in a separate process, which publishes under a CUDA IPC handle."""

    def __init__(self, folder: Path, *, gpu: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run_ipc_trainer, args=(theirs, folder, gpu), daemon=True)
        self.process.start()
        theirs.close()

    def publish(self, version: int) -> weights_pb2.PublishedWeights:
        self._pipe.send(version)
        assert self._pipe.poll(120)
        return published(version, [weights_pb2.WeightHandle.FromString(self._pipe.recv())])

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def _run_ipc_trainer(pipe: Connection, folder: Path, gpu: int) -> None:
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    shards = random_shards(TINY, rank=0, num_ranks=1, dtype=torch.float32, device=device)
    settings: dict[str, Any] = {"rank": 0, "num_ranks": 1, "dtype": torch.bfloat16}
    export = WeightExport(shards, socket_path=folder / "ipc.sock", memory=ExportMemory(handles="ipc"), **settings)
    while True:
        try:
            version = pipe.recv()
        except EOFError:
            return
        for shard in shards:
            shard.local.fill_(version + 1)
        export.publish(version)
        pipe.send(export.handle().SerializeToString())


@pytest.fixture
def ipc_trainer(tmp_path: Path) -> Iterator[IpcTrainer]:
    trainer = IpcTrainer(tmp_path, gpu=torch.cuda.device_count() - 1)
    yield trainer
    trainer.close()


def test_the_gpu_exports_descriptors_so_no_ipc_handle_is_needed() -> None:
    assert descriptor_problem(GPU) == ""


def test_an_ipc_handle_is_opened_once_and_read_at_every_sync(ipc_trainer: IpcTrainer) -> None:
    """The last GPU publishes, the first reads."""
    receivers = engines([0])
    for version in range(3):
        weights = ipc_trainer.publish(version)
        assert weights.handles[0].kind == weights_pb2.HANDLE_KIND_CUDA_IPC
        receive(receivers, weights)
        assert all(bool((held == version + 1).all()) for _, held in receivers[0].model.named_parameters())


def test_reading_by_an_ipc_handle_takes_no_context_on_the_publishers_gpu(ipc_trainer: IpcTrainer) -> None:
    """Reads in a separate process, where nothing else has used that GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=_read_by_ipc, args=(theirs, ipc_trainer.publish(0).SerializeToString()), daemon=True)
    reader.start()
    assert ours.poll(120)
    assert ours.recv() == [True, False]
    reader.join(30)


def _read_by_ipc(pipe: Connection, weights: bytes) -> None:
    """Reads the weights, then reports whether the first and the last GPU have a context."""
    receive(engines([0]), weights_pb2.PublishedWeights.FromString(weights))
    pipe.send([cast(Any, torch._C)._cuda_hasPrimaryContext(gpu) for gpu in (0, torch.cuda.device_count() - 1)])


def test_a_closed_ipc_import_leaves_no_memory_mapped(ipc_trainer: IpcTrainer) -> None:
    weights = ipc_trainer.publish(0)
    for _ in range(3):
        imported = import_weights(weights, timeout_s=5, device=GPU)
        name, entries = next(iter(imported.entries.items()))
        assert bool((imported.tensor(entries[0]) == 1).all()) and name
        imported.close()
    # The publisher still can: its memory is untouched.
    receive(engines([0]), ipc_trainer.publish(1))


@pytest.mark.parametrize("harm", ["the trainer has ended", "another handle"])
def test_an_ipc_handle_that_leads_nowhere_is_refused(ipc_trainer: IpcTrainer, tmp_path: Path, harm: str) -> None:
    weights = ipc_trainer.publish(0)
    imported = import_weights(weights, timeout_s=5)  # headers alone, as the front does
    manifest = imported._arenas[0].manifest
    ipc = manifest.ipc_memory
    assert ipc is not None and not imported.is_mapped
    if harm == "another handle":
        ipc.handle = ipc.handle[:2] + bytes(64)
    else:
        ipc_trainer.close()
    with ExitStack() as stack:
        header = imported._arenas[0].header
        message = to_proto(manifest).SerializeToString()
        server = FdServer(tmp_path / "rogue.sock", message=message, fds=[_sealed_like(header)])
        stack.callback(server.close)
        weights.handles[0].socket_path, weights.handles[0].manifest_digest = str(server.path), digest_of(message)
        with pytest.raises(BadHandle, match="cannot open its CUDA IPC handle"):
            import_weights(weights, timeout_s=5, device=GPU)
    assert torch.ones(3, device=GPU).sum() == 3, "the context is whole"


def _sealed_like(header: Any) -> int:
    from tasuki.weights.weight_arena import create_sealed

    _, fd = create_sealed("tasuki-weights-0", len(header._words) * 8)
    return fd
