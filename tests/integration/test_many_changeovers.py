"""Many changeovers leave nothing behind: a coordinator process, and scripted services with real arenas."""

import gc
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tasuki.memory.arena import Keep, NativeAllocator
from tasuki.v1.types_pb2 import PHASE_ROLLOUT, PHASE_TRAIN
from tasuki.wire.stages import MemoryTag
from tests.extent import IS_WHOLE
from tests.footprint import MIB, Footprint, footprint, growth
from tests.integration.coordinator_process import Node, running_coordinator

NUM_CHANGEOVERS = 10_000 if IS_WHOLE else 300
WARM_UP = NUM_CHANGEOVERS // 10
MAX_ADDRESS_BYTES = 256 * MIB
"""Allows for glibc's 64 MiB per new thread's heap. A chunk leaked per changeover would be 600 MiB after 300."""
MAX_GROWTH_BYTES = 12 * MIB
"""Room for the allocators' slack and for commands that gates and coordinator remember, whose number is bounded."""
TRAINER_TAGS = (MemoryTag.WEIGHTS, MemoryTag.GRADIENTS, MemoryTag.OPTIMIZER, MemoryTag.EXPORT)
ROLLOUT_TAGS = (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH)


@pytest.fixture
def arenas() -> Iterator[tuple[NativeAllocator, NativeAllocator]]:
    """The trainer's arena, whose content must survive, and rollout's."""
    kept = dict.fromkeys((MemoryTag.WEIGHTS, MemoryTag.OPTIMIZER), Keep.CONTENT)
    trainer = NativeAllocator(tags=TRAINER_TAGS, device="cpu", keep=kept)
    rollout = NativeAllocator(tags=ROLLOUT_TAGS, device="cpu")
    yield trainer, rollout
    trainer.close()
    rollout.close()


async def change_over(node: Node, *, num_changeovers: int) -> None:
    for _ in range(num_changeovers // 2):
        await node.acquire(PHASE_ROLLOUT)
        await node.acquire(PHASE_TRAIN)
        for service in (node.trainer, node.rollout):
            service.commands.clear()


def taken(node: Node) -> dict[str, Footprint]:
    gc.collect()  # Closes descriptors of earlier tests now, rather than between two readings.
    return {"coordinator": footprint(psutil.Process(node.process.pid)), "services": footprint(psutil.Process())}


@pytest.mark.timeout(900)
async def test_many_changeovers_leave_memory_addresses_and_descriptors_as_they_were(
    tmp_path: Path, unused_tcp_port: int, arenas: tuple[NativeAllocator, NativeAllocator]
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for allocator in arenas:
        for tag in allocator.tags:
            with allocator.region(tag):
                tensors[f"{tag} of {id(allocator)}"] = torch.arange(3 * MIB // 4, dtype=torch.int32)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    async with running_coordinator(tmp_path, metrics_port=unused_tcp_port) as node:
        node.trainer.arenas, node.rollout.arenas = arenas
        await change_over(node, num_changeovers=WARM_UP)
        before = taken(node)
        await change_over(node, num_changeovers=NUM_CHANGEOVERS)
        grown = growth(before, taken(node))
        assert (await node.state()).num_changeovers == WARM_UP + NUM_CHANGEOVERS
    for name, one in grown.items():
        assert max(one.num_fds, one.memfd_bytes, one.shm_bytes) <= 0, f"{name} grew by {one}"
        assert one.address_bytes < MAX_ADDRESS_BYTES and one.num_mappings < 10, f"{name} grew by {one}"
        assert one.rss_bytes < MAX_GROWTH_BYTES, f"{name} grew by {one}"
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == addresses
    kept = tensors[f"{MemoryTag.OPTIMIZER} of {id(arenas[0])}"]
    assert torch.equal(kept, torch.arange(3 * MIB // 4, dtype=torch.int32))
