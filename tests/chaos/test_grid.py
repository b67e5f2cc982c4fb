"""Every process struck in every stage, by SIGKILL and by SIGSTOP. `make chaos`; takes half an hour and writes a report."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.client import Client
from tasuki.wire.stages import Stage
from tests.chaos_node import PROCESSES, STAGES, ChaosNode, Recovery, write_recoveries
from tests.conftest import RunningNode

pytestmark = pytest.mark.timeout(300)
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


@pytest.fixture(scope="module")
def recoveries() -> Iterator[list[Recovery]]:
    seen: list[Recovery] = []
    yield seen
    write_recoveries(Path("runs/chaos"), seen)


@pytest.fixture
def chaos(node: RunningNode) -> Iterator[ChaosNode]:
    with Client(state_dir=node.state_dir) as client:
        yield ChaosNode(node, client)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("stage", STAGES)
def test_node_recovers(chaos: ChaosNode, recoveries: list[Recovery], process: str, stage: Stage, number: signal.Signals):
    recoveries.append(chaos.recovers(process, stage, number))
