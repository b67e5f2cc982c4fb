"""Loaders that a plan cannot express, and planted errors: each is caught before the weights could be served."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tasuki.rollout.receive import Received, WeightReceiver
from tasuki.transport import fd_socket, manifest
from tasuki.transport.export import WeightExport
from tasuki.transport.fd_socket import FdServer
from tasuki.transport.imported_weights import import_weights
from tasuki.transport.shards import Shard
from tasuki.v1 import weights_pb2
from tasuki.wire.errors import BadHandle, TasukiError, VersionOrder, WeightsCorrupt
from tests.models import poison
from tests.received import ReceivedPiece, check_received

TENSORS = {
    "plain": (6, 4),
    "transposed": (4, 6),
    "scale": (1,),
    "left": (3, 2),
    "right": (3, 2),
    "doubled": (5,),
}


class AwkwardModel(nn.Module):
    """Loads one tensor as plans like it, and the others by a transposed copy, by value, by concatenation and by arithmetic."""

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
    """Two ranks that publish TENSORS, with uneven rows."""

    def __init__(self, folder: Path, *, boot_id: str = "boot", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {name: torch.randn(shape, generator=generator) for name, shape in TENSORS.items()}
        self.boot_id = boot_id
        self.exports = []
        for rank in range(2):
            shards = []
            for name, tensor in self.tensors.items():
                rows = -(-tensor.shape[0] // 2)
                local = tensor[rank * rows : (rank + 1) * rows]
                if local.shape[0]:
                    shards.append(Shard(name, tuple(tensor.shape), rank * rows, local))
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
    """A sync of one engine rank as the service makes it: copy, then compare with what was published."""
    received = receiver.receive(weights, import_timeout_s=2)
    pieces = [ReceivedPiece(0, *entry) for entry in received.checksums]
    check_received(pieces, import_weights(weights, timeout_s=2))
    return received


def expected(trainer: Trainer, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """What the model's own loader makes of the published values."""
    model = AwkwardModel(dtype)
    model.load_weights((name, tensor.bfloat16()) for name, tensor in trainer.tensors.items())
    return dict(model.named_parameters())


def assert_holds(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name]), name


def test_what_a_plan_cannot_express_is_named_and_loaded_by_the_model_itself(trainer: Trainer) -> None:
    model = AwkwardModel()
    receiver = WeightReceiver(model)
    poison(model)
    received = receive(receiver, trainer.publish(0))
    assert set(received.fallback_names) == {"transposed", "scale", "left", "right", "doubled"}
    assert_holds(model, expected(trainer))
    for tensor in trainer.tensors.values():
        tensor.add_(1)
    poison(model)
    receive(receiver, trainer.publish(1))
    assert_holds(model, expected(trainer))


def test_published_bfloat16_becomes_float32_parameters(trainer: Trainer) -> None:
    model = AwkwardModel(torch.float32)
    poison(model)
    receive(WeightReceiver(model), trainer.publish(0))
    assert_holds(model, expected(trainer, torch.float32))


def test_a_cast_that_loses_precision_is_refused_with_the_dtype_to_use(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, dtype=torch.float32)
    with pytest.raises(BadHandle, match="plain is published as torch.float32.*publish it as torch.bfloat16"):
        receive(WeightReceiver(AwkwardModel()), trainer.publish(0))
    trainer.close()


def test_moved_parameters_are_recorded_anew(trainer: Trainer) -> None:
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


def test_a_new_trainer_is_imported_anew(trainer: Trainer, tmp_path: Path) -> None:
    model = AwkwardModel()
    receiver = WeightReceiver(model)
    receive(receiver, trainer.publish(0))
    restarted = Trainer(tmp_path, boot_id="reboot", seed=1)
    receive(receiver, restarted.publish(1))
    assert_holds(model, expected(restarted))
    restarted.close()


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


def test_a_skipped_tensor_is_caught_and_named_with_its_engine_rank(trainer: Trainer) -> None:
    model = AwkwardModel()
    receiver = WeightReceiver(model)
    receive(receiver, trainer.publish(0))
    del receiver._prepared._copies._copies[0]
    trainer.tensors["plain"].add_(1)
    with pytest.raises(WeightsCorrupt, match=r"1 of 6 tensors.*plain: checksum differs \(engine rank 0\)") as caught:
        receive(receiver, trainer.publish(1))
    assert caught.value.metadata == {"tensors": "plain", "rank": "0"}


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
    with pytest.raises(WeightsCorrupt, match=f"{pieces[-1].name}: engine ranks that hold the same rows differ") as caught:
        check_received(pieces, import_weights(weights, timeout_s=2))
    assert caught.value.metadata["rank"] == "1"


def test_a_missing_piece_of_zeros_is_caught(trainer: Trainer) -> None:
    """Its checksum is zero, so only the account of elements can notice."""
    trainer.tensors["plain"].zero_()
    weights = trainer.publish(0)
    received = WeightReceiver(AwkwardModel()).receive(weights, import_timeout_s=2)
    pieces = [
        ReceivedPiece(0, name, at.narrowed(0, 0, 3) if name == "plain" else at, value) for name, at, value in received.checksums
    ]
    with pytest.raises(WeightsCorrupt, match="plain: of 24 elements 12 were not received"):
        check_received(pieces, import_weights(weights, timeout_s=2))


def refusal(receiver: WeightReceiver, weights: weights_pb2.PublishedWeights) -> TasukiError:
    before = [parameter.clone() for parameter in receiver.model.parameters()]
    with pytest.raises(TasukiError) as caught:
        receive(receiver, weights)
    after = list(receiver.model.parameters())
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True)), "a refusal must change nothing"
    return caught.value


def test_another_version_than_the_published_one_is_refused(trainer: Trainer) -> None:
    trainer.publish(4)
    error = refusal(WeightReceiver(AwkwardModel()), trainer.handles(5))
    assert isinstance(error, VersionOrder)
    assert (error.metadata["want"], error.metadata["have"]) == ("5", "4")


def test_one_rank_that_is_behind_is_refused(trainer: Trainer) -> None:
    trainer.publish(4)
    trainer.exports[0].publish(5)
    error = refusal(WeightReceiver(AwkwardModel()), trainer.handles(5))
    assert error.metadata["rank"] == "1"


def test_withdrawn_and_never_published_weights_are_refused(trainer: Trainer) -> None:
    receiver = WeightReceiver(AwkwardModel())
    assert "holds empty" in str(refusal(receiver, trainer.handles(0)))
    receive(receiver, trainer.publish(0))
    trainer.exports[1].withdraw()
    assert "trainer rank 1 holds withdrawn" in str(refusal(receiver, trainer.handles(0)))


def test_a_handle_of_another_manifest_is_refused(trainer: Trainer) -> None:
    weights = trainer.publish(0)
    weights.handles[1].manifest_digest = "0" * 64
    assert "another manifest" in str(refusal(WeightReceiver(AwkwardModel()), weights))


def test_handles_that_miss_a_rank_or_repeat_one_are_refused(trainer: Trainer) -> None:
    weights = trainer.publish(0)
    one = weights_pb2.PublishedWeights(policy_version=0, boot_id="boot", handles=weights.handles[:1])
    twice = weights_pb2.PublishedWeights(policy_version=0, boot_id="boot", handles=[weights.handles[0], weights.handles[0]])
    none = weights_pb2.PublishedWeights(policy_version=0, boot_id="boot")
    for bad in (one, twice, none):
        assert isinstance(refusal(WeightReceiver(AwkwardModel()), bad), BadHandle)


def test_handles_of_another_kind_are_refused(trainer: Trainer) -> None:
    weights = trainer.publish(0)
    weights.handles[0].kind = weights_pb2.HANDLE_KIND_CUDA_IPC
    assert "HANDLE_KIND_CUDA_IPC for weights in host memory cannot" in str(refusal(WeightReceiver(AwkwardModel()), weights))
    weights.handles[0].kind = weights_pb2.HANDLE_KIND_UNSPECIFIED
    assert "HANDLE_KIND_UNSPECIFIED cannot be imported" in str(refusal(WeightReceiver(AwkwardModel()), weights))
    weights.handles[0].kind = weights_pb2.HANDLE_KIND_CUDA_VMM_FD
    assert "CUDA_VMM_FD for weights in host memory cannot" in str(refusal(WeightReceiver(AwkwardModel()), weights))


def published_by(
    folder: Path, message: bytes, *, digest: str, header_bytes: int = 4096, num_bytes: int = 4096, seals: int = 0xF
) -> weights_pb2.PublishedWeights:
    """Handles of a trainer that sends `message`, a header and one chunk of `num_bytes`; `seals` are the header's."""
    fds = [rogue_memory(header_bytes, seals=seals), rogue_memory(num_bytes, seals=0xF)]
    path = folder / "rogue.sock"
    FdServer(path, message=message, fds=fds)
    kind = weights_pb2.HANDLE_KIND_HOST_MEMFD
    handle = weights_pb2.WeightHandle(rank=0, socket_path=str(path), manifest_digest=digest, kind=kind)
    return weights_pb2.PublishedWeights(policy_version=0, boot_id="rogue", handles=[handle])


def rogue_memory(num_bytes: int, *, seals: int) -> int:
    fd = os.memfd_create("rogue", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals & ~fcntl.F_SEAL_WRITE)
    return fd


GOOD = replace(manifest.lay_out([manifest.Entry("plain", "bfloat16", (6, 4), 0, 6)], rank=0, num_ranks=1), chunk_bytes=(4096,))
HEADER_BYTES = manifest.header_bytes(1)


def test_a_truncated_manifest_is_refused(tmp_path: Path) -> None:
    message = manifest.to_proto(GOOD).SerializeToString()
    weights = published_by(tmp_path, message[:-3], digest=GOOD.digest())
    assert isinstance(refusal(WeightReceiver(AwkwardModel()), weights), BadHandle)


def test_a_manifest_with_overlapping_entries_is_refused(tmp_path: Path) -> None:
    bad = replace(GOOD, entries=(*GOOD.entries, replace(GOOD.entries[0], name="doubled")))
    weights = published_by(tmp_path, manifest.to_proto(bad).SerializeToString(), digest=bad.digest())
    assert "doubled and plain overlap" in str(refusal(WeightReceiver(AwkwardModel()), weights))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"header_bytes": 16}, "must be sealed"),
        ({"seals": 0}, "must be sealed"),
        ({"num_bytes": 8192}, "rank 0 sent memory that cpu does not map: .*the file holds 8192 bytes"),
    ],
)
def test_memory_that_is_of_another_size_or_could_shrink_is_refused(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    arguments = {"header_bytes": HEADER_BYTES, **changes}
    weights = published_by(tmp_path, manifest.to_proto(GOOD).SerializeToString(), digest=GOOD.digest(), **arguments)
    assert re.search(message, str(refusal(WeightReceiver(AwkwardModel()), weights)))


def test_memory_without_a_header_is_refused(tmp_path: Path) -> None:
    message = manifest.to_proto(GOOD).SerializeToString()
    weights = published_by(tmp_path, message, digest=GOOD.digest(), header_bytes=HEADER_BYTES)
    assert "no valid header" in str(refusal(WeightReceiver(AwkwardModel()), weights))


def test_a_receiver_cannot_map_the_memory_for_writing(trainer: Trainer) -> None:
    weights = trainer.publish(0)
    _, [header, chunk] = fd_socket.fetch(Path(weights.handles[0].socket_path), timeout_s=2)
    for fd in (header, chunk):
        with pytest.raises(PermissionError):
            mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="not permitted|Invalid argument"):
            os.ftruncate(fd, 0)
        os.close(fd)


def test_closing_leaves_no_descriptor_mapping_or_socket(tmp_path: Path) -> None:
    def footprint() -> tuple[int, int]:
        gc.collect()  # what earlier tests' errors still hold
        maps = Path("/proc/self/maps").read_text().count("memfd:tasuki")
        return len(os.listdir("/proc/self/fd")), maps

    before = footprint()
    trainer = Trainer(tmp_path)
    imported = import_weights(trainer.publish(0), timeout_s=2)
    assert footprint() > before
    imported.close()
    trainer.close()
    assert footprint() == before
    assert list(tmp_path.iterdir()) == []
