"""Two real nodes in one fleet: they change over and back, and their received weights are compared."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest

from tasuki.client import Client, Phase
from tasuki.config.lock import holder
from tasuki.coordinator.audit.history import read_history
from tasuki.coordinator.audit.replay import audit
from tasuki.fleet.audit import audit_fleet_journal
from tasuki.v1 import coordinator_pb2, fleet_pb2
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.fleet_pb2_grpc import FleetServiceStub
from tasuki.wire.address import unix_target
from tasuki.wire.channel import open_blocking_channel
from tasuki.wire.errors import HeldByFleet
from tests.conftest import RunningNode, started_node
from tests.ports import free_port

TIMEOUT_S = 300.0


def start(rank: int, leader: str, stack: ExitStack) -> RunningNode:
    fleet = f'[fleet]\nname = "pair"\nnum_nodes = 2\nnode_rank = {rank}\nleader = "{leader}"\nattempt = 1\n[security]\ninsecure = true\n'
    overrides = ("trainer.num_ranks=1", "coordinator.stage_timeout_s=1200")
    return stack.enter_context(started_node(tables=fleet, overrides=overrides))


def digests(nodes: Sequence[RunningNode]) -> list[bytes]:
    """Digests of each node's received weights, as its coordinator reports them."""
    found: list[bytes] = []
    for node in nodes:
        with open_blocking_channel(unix_target(node.state_dir, service="coordinator")) as channel:
            state = CoordinatorServiceStub(channel).GetState(coordinator_pb2.GetStateRequest(), timeout=TIMEOUT_S).state
            found.append(state.weights_digest)
    return found


def joined(leader: str) -> list[int]:
    """Ranks of the nodes that have joined; none while the leader is away."""
    with open_blocking_channel(leader) as channel:
        try:
            seen = FleetServiceStub(channel).GetFleet(fleet_pb2.GetFleetRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return []
    return [member.node.node_rank for member in seen.members]


@pytest.mark.timeout(900)
def test_two_nodes_change_over_under_one_fleet_and_outlive_its_death() -> None:
    leader = f"127.0.0.1:{free_port()}"
    with ExitStack() as first, ExitStack() as second, ThreadPoolExecutor() as threads:
        nodes = list(threads.map(start, range(2), (leader, leader), (first, second)))
        assert joined(leader) == [0, 1]
        with Client(leader) as client:
            client.acquire(Phase.ROLLOUT)
            one, other = digests(nodes)
            assert one == other != b""
            with Client(state_dir=nodes[1].state_dir) as beside, pytest.raises(HeldByFleet) as refused:
                beside.acquire(Phase.TRAIN)
            assert refused.value.metadata == {"fleet": "pair", "address": leader}
            pid = holder(nodes[0].state_dir, name="fleet")
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            ends = time.monotonic() + TIMEOUT_S
            while holder(nodes[0].state_dir, name="fleet") in (None, pid):
                assert time.monotonic() < ends
                time.sleep(0.2)
            while joined(leader) != [0, 1]:
                assert time.monotonic() < ends
                time.sleep(0.2)
            client.acquire(Phase.TRAIN)
            assert digests(nodes) == [b"", b""]
            client.acquire(Phase.ROLLOUT)
            assert digests(nodes) == [one, one]
        found = audit_fleet_journal(nodes[0].state_dir / "fleet.sqlite")
        assert (found.violation, found.num_decisions) == (None, 2)
        for node in nodes:
            assert audit(read_history(node.state_dir / "journal.sqlite")).violation is None
