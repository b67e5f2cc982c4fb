"""A second node that the session shares, with all that the first one leaves out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import RunningNode, started_node

CRITIC_STEPS, CRITIC_LEARNING_RATE = 3, 1e-3
_TABLES = f"""
[trainer.critic]
learning_rate = {CRITIC_LEARNING_RATE}
lr_schedule = "linear"
total_steps = {CRITIC_STEPS}
"""


@pytest.fixture(scope="session")
def roomy() -> Iterator[RunningNode]:
    """With a critic, on a machine that has room for everything at once: nothing leaves at a changeover."""
    with started_node(tables=_TABLES, residency="") as started:
        yield started
