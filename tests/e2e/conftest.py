"""A second node that the session shares, with all that the first one leaves out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import RunningNode, started_node

_ROOM = 24 * 10**9
CRITIC_STEPS, CRITIC_LEARNING_RATE = 3, 1e-3
_TABLES = f"""
[trainer.critic]
learning_rate = {CRITIC_LEARNING_RATE}
lr_schedule = "linear"
total_steps = {CRITIC_STEPS}
"""


@pytest.fixture(scope="session")
def roomy() -> Iterator[RunningNode]:
    """With a critic, and room for everything at once, whatever else the machine does: nothing leaves at a changeover."""
    with started_node(tables=_TABLES, residency="", overrides=[f"memory.host_budget_bytes={_ROOM}"]) as started:
        yield started
