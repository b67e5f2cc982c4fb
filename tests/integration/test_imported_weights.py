"""A reader's access to the arenas of all trainer ranks: when it opens them, and the order in which it reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasuki.rollout.receive import WeightReceiver
from tasuki.v1 import weights_pb2
from tasuki.weights import fd_socket, imported_weights, manifest
from tasuki.weights.header import Header, create_sealed
from tasuki.weights.weight_arena import WeightArena
from tests.integration.awkward_model import AwkwardModel, Trainer


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.close()


def test_handles_are_opened_once_for_each_start_of_the_trainer(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched, fetch = list[Path](), fd_socket.fetch

    def counted(path: Path, *, timeout_s: float) -> tuple[bytes, list[int]]:
        fetched.append(path)
        return fetch(path, timeout_s=timeout_s)

    monkeypatch.setattr(fd_socket, "fetch", counted)
    receiver = WeightReceiver(AwkwardModel())
    for version in range(3):
        receiver.receive(trainer.publish(version), import_timeout_s=2)
    assert sorted(fetched) == sorted(Path(handle.socket_path) for handle in trainer.handles(2).handles)


def arena_on(device_uuid: str, *, rank: int) -> WeightArena:
    """Returns an arena as a process without a GPU maps it: only its header."""
    layout = manifest.lay_out([manifest.Entry("plain", "bfloat16", (6, 4), (2 * rank, 0), (2, 4))], rank=rank, num_ranks=3)
    mapping, fd = create_sealed("header", manifest.header_bytes(1))
    os.close(fd)
    there = replace(layout, device_uuid=device_uuid)
    kind = weights_pb2.HANDLE_KIND_CUDA_VMM_FD
    return WeightArena(there, kind=kind, header=Header(there, mapping), tensors=())


@pytest.mark.parametrize(("here", "index", "first"), [("a", 0, 1), ("b", 1, 2), ("c", 2, 0), ("none of theirs", 1, 1)])
def test_each_gpu_begins_with_the_owner_after_its_own(
    here: str, index: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imported_weights, "device_uuid", lambda device: here)
    arenas = [arena_on(uuid, rank=rank) for rank, uuid in enumerate("abc")]
    handles = [weights_pb2.WeightHandle(rank=rank) for rank in range(3)]
    weights = imported_weights.ImportedWeights(handles, arenas, boot_id="boot")
    assert weights.first_owner(torch.device("cuda", index)) == first
    weights.close()
