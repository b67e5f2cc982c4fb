"""A node whose supervisor is killed: nothing of it is left, and the node can be resumed from its state."""

import json
import os
import signal
from pathlib import Path

import pytest

from tasuki.client import Client, Phase
from tasuki.config.lock import NODE_LOCK, holder
from tasuki.config.paths import exit_path, socket_dir
from tests.chaos_node import ChaosNode
from tests.conftest import RunningNode, assert_clean_audit, tasuki
from tests.limits import wait_for

GONE_WITHIN_S = 10.0


@pytest.mark.timeout(700)
def test_a_node_whose_supervisor_was_killed_leaves_nothing_behind_and_can_be_resumed(node: RunningNode) -> None:
    processes = processes_of(node.state_dir)
    assert len(processes) >= 7  # guard, supervisor, coordinator, launcher, two ranks, rollout, and the engine's own
    with Client(state_dir=node.state_dir) as client:
        chaos = ChaosNode(node, client)
        client.acquire(Phase.TRAIN)
        version = chaos.step()
        client.acquire(Phase.ROLLOUT)
        tokens = chaos.greedy()
    supervisor_pid = holder(node.state_dir, name=NODE_LOCK)
    assert supervisor_pid is not None
    os.kill(supervisor_pid, signal.SIGKILL)
    wait_for(lambda: holder(node.state_dir, name=NODE_LOCK) is None, GONE_WITHIN_S)
    assert processes_of(node.state_dir) & processes == set()
    assert list(socket_dir(node.state_dir).iterdir()) == []
    assert json.loads(exit_path(node.state_dir).read_text())["reason"] == "the supervisor was killed by SIGKILL"
    assert node.up.wait(GONE_WITHIN_S) == 2  # NODE_DOWN
    socket_dir(node.state_dir).rmdir()

    resumed = tasuki("up", node.config, "--resume", timeout_s=300)
    assert resumed.returncode == 0, resumed.stderr
    with Client(state_dir=node.state_dir) as client:
        assert client.trainer_state().policy_version == version
        client.acquire(Phase.ROLLOUT)
        assert ChaosNode(node, client).greedy() == tokens  # the same weights
    assert_clean_audit(node.state_dir)


def processes_of(state_dir: Path) -> set[int]:
    """Processes with the node's state folder on their command line, and their descendants."""
    found: set[int] = set()
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if str(state_dir) in (entry / "cmdline").read_text() and "--foreground" not in (entry / "cmdline").read_text():
                    found.add(int(entry.name))
            except OSError:
                continue
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return found
