"""A node in memory: the real coordinator and journal, over services that fail on request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tasuki.coordinator.journal import Journal
from tasuki.coordinator.node import Node
from tests.unit.fake_node import make_node
from tests.unit.fake_services import FakeServices

# How long an example takes says how busy the machine is, no more.
settings.register_profile("tasuki", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tasuki")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.begin_epoch("boot-1")
    yield journal
    journal.close()


@pytest.fixture
def services() -> FakeServices:
    return FakeServices()


@pytest.fixture
async def node(journal: Journal, services: FakeServices) -> Node:
    return make_node(journal, services)
