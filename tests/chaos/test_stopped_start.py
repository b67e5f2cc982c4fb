"""A scheduler stopped while the engine restarts after a kill, in a node whose client waits."""

import os
import signal
import time
from pathlib import Path

import pytest

from tasuki.client import Client, Phase
from tasuki.config.paths import log_path, stall_dir
from tests.chaos_node import ChaosNode
from tests.conftest import RunningNode
from tests.limits import limit_s

# Far below the client's ten minutes for a call: two starts of the engine, and the detection of a hang between them.
RECOVERED_WITHIN_S = limit_s(300.0)
STARTED_WITHIN_S = limit_s(60.0)


@pytest.mark.timeout(700)
def test_a_scheduler_stopped_while_the_engine_starts_after_a_kill_is_replaced(node: RunningNode) -> None:
    with Client(state_dir=node.state_dir) as client:
        chaos = ChaosNode(node, client)
        client.acquire(Phase.TRAIN)
        version = chaos.step()
        client.acquire(Phase.ROLLOUT)
        tokens = chaos.greedy()
        (killed,) = chaos.pids("scheduler0")
        os.kill(killed, signal.SIGKILL)
        stopped = started_scheduler(chaos, other_than=killed)
        os.kill(stopped, signal.SIGSTOP)
        struck = time.monotonic()
        client.acquire(Phase.ROLLOUT)
        assert chaos.greedy() == tokens  # the same weights
        assert time.monotonic() - struck < RECOVERED_WITHIN_S
        assert client.state().policy_version == version
        (serving,) = chaos.pids("scheduler0")
    assert serving not in (killed, stopped)
    assert not Path(f"/proc/{stopped}").exists()
    noticed = [line for line in log_path(node.state_dir, "supervisor").read_text().splitlines() if f"pid={stopped}" in line]
    assert any("no heartbeat for" in line for line in noticed), noticed
    assert any(str(stopped) in path.name for path in stall_dir(node.state_dir).iterdir())


def started_scheduler(chaos: ChaosNode, *, other_than: int) -> int:
    """Returns the scheduler of the next start, as soon as it has a pulse, long before it serves."""
    deadline = time.monotonic() + STARTED_WITHIN_S
    while time.monotonic() < deadline:
        found = [pid for pid in chaos.pids("scheduler0") if pid != other_than]
        if found:
            return found[0]
        time.sleep(0.05)
    raise AssertionError("the engine was not started again")
