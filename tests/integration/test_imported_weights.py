"""The order in which a reader takes the arenas of all trainer ranks."""

import os
from dataclasses import replace

import pytest
import torch

from tasuki.v1 import weights_pb2
from tasuki.weights import imported_weights, manifest
from tasuki.weights.weight_arena import Header, WeightArena, create_sealed


def arena_on(device_uuid: str, *, rank: int) -> WeightArena:
    """Returns an arena as a process without a GPU maps it: only its header."""
    layout = manifest.lay_out([manifest.Entry("plain", "bfloat16", (6, 4), (2 * rank, 0), (2, 4))], rank=rank, num_ranks=3)
    mapping, fd = create_sealed("header", manifest.header_bytes(1))
    os.close(fd)
    there = replace(layout, device_uuid=device_uuid)
    kind = weights_pb2.HANDLE_KIND_CUDA_VMM_FD
    return WeightArena(there, kind=kind, header=Header(there, mapping), tensors=())


@pytest.mark.parametrize(("here", "index", "first"), [("a", 0, 1), ("b", 1, 2), ("c", 2, 0), ("none of theirs", 1, 1)])
def test_each_gpu_begins_with_the_owner_after_its_own(here: str, index: int, first: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(imported_weights, "device_uuid", lambda device: here)
    arenas = [arena_on(uuid, rank=rank) for rank, uuid in enumerate("abc")]
    handles = [weights_pb2.WeightHandle(rank=rank) for rank in range(3)]
    weights = imported_weights.ImportedWeights(handles, arenas, boot_id="boot")
    assert weights.first_owner(torch.device("cuda", index)) == first
    weights.close()
