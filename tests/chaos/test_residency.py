"""Processes killed and stopped in stages that move no memory, since everything stays: nothing is lost, and the audit is clean."""

import signal
from collections.abc import Iterator

import pytest

from tasuki.client import Client, Phase
from tasuki.wire.stages import Stage
from tests.chaos_node import ChaosNode
from tests.conftest import RunningNode, assert_clean_audit, started_node

STRIKES = (
    ("scheduler0", Stage.SYNC, signal.SIGKILL),
    ("trainer1", Stage.OFFLOAD, signal.SIGKILL),
    ("rollout", Stage.RESUME_KV, signal.SIGKILL),
    ("trainer1", Stage.LOAD_TRAINER, signal.SIGKILL),
    ("scheduler0", Stage.PAUSE_KV, signal.SIGKILL),
    ("coordinator", Stage.OFFLOAD, signal.SIGKILL),
    ("trainer1", Stage.LOAD_WEIGHTS, signal.SIGSTOP),
)


@pytest.fixture(scope="module")
def roomy() -> Iterator[RunningNode]:
    with started_node(choices={}) as started:
        yield started


@pytest.mark.timeout(900)
def test_strikes_in_stages_that_move_nothing_lose_nothing(roomy: RunningNode) -> None:
    with Client(state_dir=roomy.state_dir) as client:
        chaos = ChaosNode(roomy, client)
        client.acquire(Phase.TRAIN)
        chaos.step()
        for process, stage, number in STRIKES:
            chaos.strike(process, stage, number)
            client.acquire(Phase.TRAIN)
            assert chaos.log_probs() == chaos.learned, (process, stage)
    assert_clean_audit(roomy.state_dir)
