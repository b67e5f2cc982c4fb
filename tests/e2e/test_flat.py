"""Changeovers leave nothing behind: thirty here, a thousand in tests/chaos/test_flat.py."""

from __future__ import annotations

import time

from tasuki.client import Client
from tests.conftest import RunningNode
from tests.footprint import MIB, change_over, footprints, growth

NUM_LOOKS = 10


def test_thirty_changeovers_leave_no_descriptor_and_no_shared_memory(node: RunningNode) -> None:
    with Client(state_dir=node.state_dir) as client:
        change_over(client, num_changeovers=10)
        before = footprints(node)
        change_over(client, num_changeovers=30)
        grown = growth(before, footprints(node))
        for _ in range(NUM_LOOKS):
            if max(one.num_fds for one in grown.values()) <= 0:
                break
            time.sleep(0.2)  # a file may be open for a moment
            grown = growth(before, footprints(node))
    assert len(grown) >= 6  # supervisor, coordinator, launcher, two ranks, rollout, its engine rank
    for name, one in grown.items():
        assert max(one.num_fds, one.memfd_bytes, one.shm_bytes) <= 0, f"{name} grew by {one}"
        assert one.rss_bytes < 8 * MIB, f"{name} grew by {one}"
