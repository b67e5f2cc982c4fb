"""Handles, manifests and memory that a receiver must not use are refused before anything is written."""

import fcntl
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasuki.rollout.receive import WeightReceiver
from tasuki.v1 import weights_pb2
from tasuki.weights import fd_socket, manifest
from tasuki.weights.export import Shard, WeightExport
from tasuki.weights.fd_socket import FdServer
from tasuki.weights.manifest import Box
from tasuki.wire.errors import BadHandle, TasukiError, VersionOrder
from tests.integration.awkward_model import AwkwardModel, Trainer, receive, trainer
from tests.slices import part_of

__all__ = ["trainer"]


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


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("kind", weights_pb2.HANDLE_KIND_CUDA_IPC, "HANDLE_KIND_CUDA_IPC for weights in host memory cannot"),
        ("kind", weights_pb2.HANDLE_KIND_CUDA_VMM_FD, "CUDA_VMM_FD for weights in host memory cannot"),
        ("kind", 99, "handles of kind 99 cannot be imported"),
        ("rank", 7, "rank 0 is missing"),
        ("socket_path", "/nonexistent/w.sock", "gave no descriptor: "),
        ("manifest_digest", "0" * 64, "a manifest that differs"),
    ],
)
def test_what_is_refused_at_first_is_refused_later_as_well(trainer: Trainer, field: str, value: object, said: str) -> None:
    receiver = WeightReceiver(AwkwardModel())
    weights = trainer.publish(0)
    setattr(weights.handles[0], field, value)
    assert said in str(refusal(receiver, weights))
    receive(receiver, trainer.publish(0))
    weights.policy_version = trainer.publish(1).policy_version
    assert said in str(refusal(receiver, weights))
    receive(receiver, trainer.publish(2))


def published_by(folder: Path, *, header_bytes: int, num_bytes: int = 4096, seals: int = 0xF) -> weights_pb2.PublishedWeights:
    """Handles of a trainer that sends GOOD, a header and one chunk of `num_bytes`; `seals` are the header's."""
    message = manifest.to_proto(GOOD).SerializeToString()
    fds = [rogue_memory(header_bytes, seals=seals), rogue_memory(num_bytes, seals=0xF)]
    path = folder / "rogue.sock"
    FdServer(path, message=message, fds=fds)
    kind = weights_pb2.HANDLE_KIND_HOST_MEMFD
    handle = weights_pb2.WeightHandle(rank=0, socket_path=str(path), manifest_digest=manifest.digest_of(message), kind=kind)
    return weights_pb2.PublishedWeights(policy_version=0, boot_id="rogue", handles=[handle])


def rogue_memory(num_bytes: int, *, seals: int) -> int:
    fd = os.memfd_create("rogue", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals & ~fcntl.F_SEAL_WRITE)
    return fd


GOOD = replace(
    manifest.lay_out([manifest.Entry("plain", "bfloat16", (6, 4), (0, 0), (6, 4))], rank=0, num_ranks=1), chunk_bytes=(4096,)
)
HEADER_BYTES = manifest.header_bytes(1)


@contextmanager
def exported(folder: Path, boxes: Sequence[Box]) -> Iterator[weights_pb2.PublishedWeights]:
    """Publishes a tensor of shape (6, 4) from ranks that hold one box each."""
    tensor = torch.randn(6, 4)
    with ExitStack() as stack:
        published = weights_pb2.PublishedWeights(policy_version=0, boot_id="boxes")
        for rank, box in enumerate(boxes):
            shard = Shard("plain", (6, 4), box.offsets, part_of(tensor, box))
            path = folder / f"{rank}.sock"
            export = WeightExport([shard], rank=rank, num_ranks=len(boxes), dtype=torch.bfloat16, socket_path=path)
            stack.callback(export.close)
            export.publish(0)
            published.handles.append(export.handle())
        yield published


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"header_bytes": 16}, "must be sealed"),
        ({"seals": 0}, "must be sealed"),
        ({}, "no valid header"),
        ({"num_bytes": 8192}, "rank 0 sent memory that cpu does not map: .*the file holds 8192 bytes"),
    ],
)
def test_memory_of_another_size_without_a_header_or_that_could_shrink_is_refused(
    tmp_path: Path, changes: dict[str, int], message: str
):
    weights = published_by(tmp_path, **{"header_bytes": HEADER_BYTES, **changes})
    assert re.search(message, str(refusal(WeightReceiver(AwkwardModel()), weights)))


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([Box((0, 0), (3, 4)), Box((2, 1), (4, 2))], "plain: [2:3, 1:3] of shape (6, 4) is published by two trainer ranks"),
        ([Box((0, 0), (3, 4)), Box((3, 0), (3, 3))], "plain: [3:6, 3:4] of shape (6, 4) is not published by any trainer rank"),
    ],
)
def test_slices_that_do_not_make_up_their_tensor_are_refused_by_name(boxes: list[Box], message: str, tmp_path: Path) -> None:
    with exported(tmp_path, boxes) as published:
        error = refusal(WeightReceiver(AwkwardModel()), published)
    assert isinstance(error, BadHandle) and str(error) == message
    assert error.metadata["tensor"] == "plain"


def test_a_receiver_cannot_map_the_memory_for_writing(trainer: Trainer) -> None:
    weights = trainer.publish(0)
    _, [header, chunk] = fd_socket.fetch(Path(weights.handles[0].socket_path), timeout_s=2)
    for fd in (header, chunk):
        with pytest.raises(PermissionError):
            mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="not permitted|Invalid argument"):
            os.ftruncate(fd, 0)
        os.close(fd)
