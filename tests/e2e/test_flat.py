"""Changeovers leave nothing behind: thirty here, a thousand in `make chaos`."""

import time

import pytest

from tasuki.client import Client
from tests.conftest import RunningNode
from tests.extent import IS_WHOLE
from tests.footprint import MIB, change_over, footprints, growth

WARM_UP, IN_A_ROW = (100, 1000) if IS_WHOLE else (10, 30)
# Room for the allocators' slack and for commands that gates and coordinator remember, whose number is bounded.
MAX_GROWTH_BYTES = 12 * MIB
NUM_LOOKS = 10


@pytest.mark.timeout(1200)
def test_changeovers_leave_memory_descriptors_and_shared_memory_as_they_were(node: RunningNode) -> None:
    with Client(state_dir=node.state_dir) as client:
        change_over(client, num_changeovers=WARM_UP)
        before = footprints(node)
        change_over(client, num_changeovers=IN_A_ROW)
        grown = growth(before, footprints(node))
        for _ in range(NUM_LOOKS):
            if max(one.num_fds for one in grown.values()) <= 0:
                break
            time.sleep(0.2)  # a file may be open for a moment
            grown = growth(before, footprints(node))
    assert len(grown) >= 6  # supervisor, coordinator, launcher, two ranks, rollout, its engine rank
    for name, one in grown.items():
        assert max(one.num_fds, one.memfd_bytes, one.shm_bytes) <= 0, f"{name} grew by {one}"
        assert one.rss_bytes < MAX_GROWTH_BYTES, f"{name} grew by {one}"
