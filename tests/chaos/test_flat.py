"""A node is as large after a thousand changeovers as after a hundred. Part of `make chaos`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tasuki.client import Client
from tests.conftest import RunningNode
from tests.footprint import MIB, change_over, footprints, growth

WARM_UP, IN_A_ROW = 100, 1000
# Room for the allocators' slack and for commands that gates and coordinator remember, whose number is bounded.
MAX_GROWTH_BYTES = 12 * MIB


@pytest.mark.timeout(1200)
def test_a_thousand_changeovers_leave_memory_descriptors_and_shared_memory_as_they_were(node: RunningNode) -> None:
    report = ["changeovers process rss_mib fds memfd_mib shm_mib"]

    def note(number: int) -> None:
        for name, one in footprints(node).items():
            sizes = " ".join(f"{size / MIB:.2f}" for size in (one.memfd_bytes, one.shm_bytes))
            report.append(f"{number} {name.replace(' ', ':')} {one.rss_bytes / MIB:.2f} {one.num_fds} {sizes}")

    with Client(state_dir=node.state_dir) as client:
        change_over(client, num_changeovers=WARM_UP)
        before = footprints(node)
        started = time.monotonic()
        for number in range(0, IN_A_ROW, 100):
            note(number)
            change_over(client, num_changeovers=100)
        seconds = time.monotonic() - started
        note(IN_A_ROW)
        grown = growth(before, footprints(node))
    report.append(f"{IN_A_ROW} changeovers in {seconds:.1f} s")
    Path("runs/chaos").mkdir(parents=True, exist_ok=True)
    Path("runs/chaos/flat.txt").write_text("\n".join(report) + "\n")
    for name, one in grown.items():
        assert (one.num_fds, one.memfd_bytes, one.shm_bytes) == (0, 0, 0), f"{name} grew by {one}"
        assert one.rss_bytes < MAX_GROWTH_BYTES, f"{name} grew by {one}"
