"""A node whose processes are killed or stopped in the middle of a changeover recovers by itself. `make chaos` runs all cases."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tasuki.client import Client, Phase
from tasuki.wire.stages import Stage
from tests.chaos_node import ChaosNode
from tests.conftest import RunningNode, assert_clean_audit
from tests.extent import IS_WHOLE
from tests.limits import limit_s

pytestmark = pytest.mark.timeout(300)
# A killed process is noticed at once, a stopped one after 12 s without a pulse: a twentieth of a stage's deadline.
NOTICED_S = {signal.SIGKILL: limit_s(3.0), signal.SIGSTOP: limit_s(18.0)}


@pytest.fixture
def chaos(node: RunningNode) -> Iterator[ChaosNode]:
    with Client(state_dir=node.state_dir) as client:
        yield ChaosNode(node, client)


@pytest.mark.parametrize(
    ("process", "stage", "number"),
    [
        ("coordinator", Stage.SYNC, signal.SIGKILL),
        ("trainer1", Stage.OFFLOAD, signal.SIGKILL),
        ("coordinator", Stage.PAUSE_WEIGHTS, signal.SIGSTOP),
        *([("scheduler0", Stage.PAUSE_KV, signal.SIGKILL)] if IS_WHOLE else []),
    ],
)
def test_phase_is_reached_and_nothing_trained_is_lost(
    chaos: ChaosNode, process: str, stage: Stage, number: signal.Signals
) -> None:
    chaos.client.acquire(Phase.TRAIN)
    version = chaos.step()
    chaos.client.acquire(Phase.ROLLOUT)
    tokens = chaos.greedy()
    is_to_rollout = stage in (Stage.SYNC, Stage.OFFLOAD)
    recovery = chaos.strike(process, stage, number)
    assert recovery.detected_s < NOTICED_S[number]
    if is_to_rollout:
        tokens = chaos.greedy()
    chaos.client.acquire(Phase.TRAIN)
    assert chaos.client.trainer_state().policy_version == version + is_to_rollout
    assert chaos.log_probs() == chaos.learned
    chaos.client.acquire(Phase.ROLLOUT)
    assert chaos.client.state().policy_version == version + is_to_rollout
    # The same weights as before the strike, or after another sync.
    assert chaos.greedy() == tokens


def test_the_journal_of_all_that_is_clean(node: RunningNode) -> None:
    assert "logged_commands=0" not in assert_clean_audit(node.state_dir)
