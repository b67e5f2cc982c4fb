"""Where published weights lie on real GPUs: parameters in place, copies that leave, legacy IPC handles, trainers on some of the GPUs.

Needs `make native`, a CUDA GPU and no network.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tasuki.memory.allocator import NativeAllocator
from tasuki.memory.arena import Keep
from tasuki.memory.tags import MemoryTag
from tasuki.rollout.receive import WeightReceiver
from tasuki.transport.export import ExportMemory, WeightExport
from tasuki.transport.fd_socket import FdServer
from tasuki.transport.imported_weights import import_weights
from tasuki.transport.manifest import to_proto
from tasuki.transport.shards import Shard
from tasuki.v1 import weights_pb2
from tasuki.wire.errors import BadHandle
from tests.bench.sync_shapes import QWEN, QwenModel, random_shards
from tests.received import ReceivedPiece, check_received

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

GPU = torch.device("cuda:0")
MIB = 1 << 20
WEIGHTS, EXPORT = MemoryTag.WEIGHTS, MemoryTag.EXPORT
TINY = QWEN["tiny"]


class TrainerRank:
    """A rank's shards in the arena of `weights` on one GPU, beside something that is nobody's business, and their export."""

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
        with self.export.leaving():
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
    """Whole bfloat16 tensors out of the ranks' shards."""
    return [
        (first.name, torch.cat([rank[index].local.bfloat16().to(device) for rank in shards]))
        for index, first in enumerate(shards[0])
    ]


def engines(gpus: Sequence[int]) -> list[WeightReceiver]:
    """Tensor-parallel ranks, one on each GPU of the list."""
    sizes = {"tp_size": len(gpus), "dtype": torch.bfloat16}
    devices = [torch.device("cuda", gpu) for gpu in gpus]
    return [WeightReceiver(QwenModel(TINY, tp_rank=rank, device=device, **sizes)) for rank, device in enumerate(devices)]


def receive(receivers: Sequence[WeightReceiver], weights: weights_pb2.PublishedWeights) -> None:
    front = import_weights(weights, timeout_s=5)
    pieces = [
        ReceivedPiece(rank, *sums)
        for rank, receiver in enumerate(receivers)
        for sums in receiver.receive(weights, import_timeout_s=5).checksums
    ]
    check_received(pieces, front)
    front.close()


def assert_hold(receivers: Sequence[WeightReceiver], tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Bit for bit what the model's own loader makes of the tensors."""
    for rank, receiver in enumerate(receivers):
        device = next(iter(receiver.model.named_parameters()))[1].device
        loaded = QwenModel(TINY, tp_rank=rank, tp_size=len(receivers), dtype=torch.bfloat16, device=device)
        loaded.load_weights([(name, tensor.to(device)) for name, tensor in tensors])
        for (name, held), (_, wanted) in zip(receiver.model.named_parameters(), loaded.named_parameters(), strict=True):
            assert torch.equal(held.data.view(torch.int16), wanted.data.view(torch.int16)), name


def free_bytes(gpu: int = 0) -> int:
    torch.cuda.synchronize(gpu)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(gpu)[0]


MODES = [
    pytest.param(torch.bfloat16, True, id="in place"),
    pytest.param(torch.bfloat16, False, id="copied"),
    pytest.param(torch.float32, False, id="cast"),
]


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
@pytest.mark.parametrize(("dtype", "in_place"), MODES)
def test_round_after_round_arrives_by_one_plan_and_what_leaves_is_free_for_others(
    tmp_path: Path, dtype: torch.dtype, in_place: bool, leaves: bool
) -> None:
    trainer = TrainerRank(tmp_path, gpu=0, dtype=dtype, in_place=in_place, leaves=leaves)
    receivers = engines([0])
    plan = None
    for version in range(3):
        receive(receivers, published(version, [trainer.publish(version)]))
        wanted = checkpoint([trainer.shards], GPU)
        assert_hold(receivers, wanted)
        assert plan in (None, receivers[0].plan)
        plan = receivers[0].plan
        awake = free_bytes()
        released = trainer.offload()
        assert free_bytes() - awake >= released - 64 * MIB
        stay = in_place and not leaves
        assert released == 0 if stay else released >= 1 << 30
        trainer.load()
        trainer.train()
    trainer.close()


def test_a_publication_in_place_takes_no_memory_and_shares_nothing_else(tmp_path: Path) -> None:
    trainer = TrainerRank(tmp_path, gpu=0, dtype=torch.bfloat16, in_place=True, leaves=False)
    before = free_bytes()
    trainer.publish(0)
    assert before - free_bytes() < 16 * MIB
    assert trainer.export.copies is None
    places = [shard.local.data_ptr() for shard in trainer.shards]
    assert [held.data_ptr() for held in trainer.export._arena.tensors] == places
    assert sum(trainer.export._arena.manifest.chunk_bytes) < 1 << 30
    trainer.close()


# --- trainers on some of the GPUs, engines on others

SPREADS = {
    2: [((0,), (1,)), ((1,), (0, 1)), ((0, 1), (1,)), ((0, 1), (1, 0))],
    4: [((2, 3), (0, 1, 2, 3)), ((1,), (0, 1, 2, 3)), ((0, 1, 2, 3), (3,)), ((0, 1), (2, 3)), ((3, 2, 1, 0), (0, 2))],
}


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize(("trainer_gpus", "engine_gpus"), [pair for pairs in SPREADS.values() for pair in pairs], ids=str)
def test_any_gpus_can_read_any_others(
    tmp_path: Path, trainer_gpus: tuple[int, ...], engine_gpus: tuple[int, ...], in_place: bool
) -> None:
    needed = max(*trainer_gpus, *engine_gpus) + 1
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs")
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "in_place": in_place, "leaves": True, "num_ranks": len(trainer_gpus)}
    ranks = [TrainerRank(tmp_path, gpu=gpu, rank=rank, **settings) for rank, gpu in enumerate(trainer_gpus)]
    receivers = engines(engine_gpus)
    for version in range(2):
        receive(receivers, published(version, [rank.publish(version) for rank in ranks]))
        assert_hold(receivers, checkpoint([rank.shards for rank in ranks], torch.device("cpu")))
        for rank in ranks:
            rank.offload()
            rank.load()
            rank.train()
    for rank in ranks:
        rank.close()


# --- legacy handles


class IpcTrainer:
    """A trainer rank in a process of its own, which publishes under a CUDA IPC handle."""

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


def test_an_ipc_handle_is_opened_once_and_read_at_every_sync(ipc_trainer: IpcTrainer) -> None:
    """The last GPU publishes, the first reads."""
    receivers = engines([0])
    for version in range(3):
        weights = ipc_trainer.publish(version)
        assert weights.handles[0].kind == weights_pb2.HANDLE_KIND_CUDA_IPC
        receive(receivers, weights)
        assert all(bool((held == version + 1).all()) for _, held in receivers[0].model.named_parameters())


def test_reading_by_an_ipc_handle_takes_no_context_on_the_publishers_gpu(ipc_trainer: IpcTrainer) -> None:
    """In a process of its own, where nothing else has used that GPU."""
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
    """Says whether there are contexts on the first and on the last GPU then."""
    receive(engines([0]), weights_pb2.PublishedWeights.FromString(weights))
    pipe.send([torch._C._cuda_hasPrimaryContext(gpu) for gpu in (0, torch.cuda.device_count() - 1)])


def test_a_closed_ipc_import_leaves_no_memory_mapped(ipc_trainer: IpcTrainer) -> None:
    weights = ipc_trainer.publish(0)
    for _ in range(3):
        imported = import_weights(weights, timeout_s=5, device=GPU)
        name, entries = next(iter(imported.entries.items()))
        assert bool((imported.tensor(entries[0]) == 1).all()) and name
        imported.close()
    # The publisher still can: nobody has taken its memory away.
    receive(engines([0]), ipc_trainer.publish(1))


def test_an_ipc_handle_is_refused_in_the_process_that_made_it(tmp_path: Path) -> None:
    shards = random_shards(TINY, rank=0, num_ranks=1, dtype=torch.float32, device=GPU)
    settings: dict[str, Any] = {"rank": 0, "num_ranks": 1, "dtype": torch.bfloat16}
    export = WeightExport(shards, socket_path=tmp_path / "ipc.sock", memory=ExportMemory(handles="ipc"), **settings)
    export.publish(0)
    with pytest.raises(BadHandle, match="opens no handle in the process that made it"):
        import_weights(published(0, [export.handle()]), timeout_s=5, device=GPU)
    export.close()


@pytest.mark.parametrize("harm", ["the trainer has ended", "another handle"])
def test_an_ipc_handle_that_leads_nowhere_is_refused(ipc_trainer: IpcTrainer, tmp_path: Path, harm: str) -> None:
    weights = ipc_trainer.publish(0)
    imported = import_weights(weights, timeout_s=5)  # headers alone, as the front does
    manifest = imported._arenas[0].manifest
    ipc = manifest.ipc_memory
    assert ipc is not None and not imported.is_mapped
    if harm == "another handle":
        manifest = replace(manifest, ipc_memory=replace(ipc, handle=ipc.handle[:2] + bytes(64)))
    else:
        ipc_trainer.close()
    with ExitStack() as stack:
        header = imported._arenas[0].header
        server = FdServer(tmp_path / "rogue.sock", message=to_proto(manifest).SerializeToString(), fds=[_sealed_like(header)])
        stack.callback(server.close)
        weights.handles[0].socket_path, weights.handles[0].manifest_digest = str(server.path), manifest.digest()
        with pytest.raises(BadHandle, match="does not open its CUDA IPC handle"):
            import_weights(weights, timeout_s=5, device=GPU)
    assert torch.ones(3, device=GPU).sum() == 3, "the context is whole"


def _sealed_like(header: Any) -> int:
    from tasuki.transport.header import create_sealed

    _, fd = create_sealed("tasuki-weights-0", len(header._words) * 8)
    return fd
