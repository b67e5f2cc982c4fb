"""Many changeovers leave nothing behind in a coordinator process and in simulated services."""

import gc
from pathlib import Path

import psutil
import pytest

from tasuki.v1.types_pb2 import PHASE_ROLLOUT, PHASE_TRAIN
from tests.extent import IS_WHOLE
from tests.footprint import MIB, Footprint, footprint, growth
from tests.integration.coordinator_process import Node, running_coordinator

NUM_CHANGEOVERS = 10_000 if IS_WHOLE else 300
WARM_UP = NUM_CHANGEOVERS // 10
MAX_ADDRESS_BYTES = 256 * MIB
"""Allows for glibc's 64 MiB per new thread's heap. A chunk leaked per changeover would be 600 MiB after 300."""
MAX_GROWTH_BYTES = 12 * MIB
"""Room for the allocators' slack and for commands that gates and coordinator remember, whose number is bounded."""


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
async def test_many_changeovers_leave_memory_and_descriptors_as_they_were(tmp_path: Path, unused_tcp_port: int):
    async with running_coordinator(tmp_path, metrics_port=unused_tcp_port) as node:
        await change_over(node, num_changeovers=WARM_UP)
        before = taken(node)
        await change_over(node, num_changeovers=NUM_CHANGEOVERS)
        grown = growth(before, taken(node))
        assert (await node.state()).num_changeovers == WARM_UP + NUM_CHANGEOVERS
    for name, one in grown.items():
        assert max(one.num_fds, one.memfd_bytes, one.shm_bytes) <= 0, f"{name} grew by {one}"
        assert one.address_bytes < MAX_ADDRESS_BYTES and one.num_mappings < 10, f"{name} grew by {one}"
        assert one.rss_bytes < MAX_GROWTH_BYTES, f"{name} grew by {one}"
