"""Connections from the fleet to a node, cut before and after every message: one version is served, and the changeover continues.

`make test` runs a sample of the messages, `make fleet` all. tests/unit/test_fleet_faults.py has more faults, on simulated connections.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import pytest

from tasuki.config.schema import NodeConfig
from tasuki.fleet.audit import audit_fleet_journal
from tasuki.fleet.digests import this_member
from tasuki.fleet.fleet import Fleet
from tasuki.fleet.journal import FleetJournal
from tasuki.fleet.node_peer import NodePeer
from tasuki.fleet.nodes import FleetNodes
from tasuki.memory.stages import Phase
from tasuki.v1.fleet_pb2 import FleetCommand
from tests.extent import IS_WHOLE
from tests.integration.faulty_proxy import Break, FaultyProxy
from tests.integration.test_fleet import config_of, serving_node
from tests.unit.simulated_fleet import MemberNode

NUM_MESSAGES = 11
"""Messages to one node in a round trip: nine stages, and one look in each direction."""
MESSAGES = range(1, NUM_MESSAGES + 1) if IS_WHOLE else (3, 5, 8)
BREAKS = (Break.LOST_BEFORE, Break.LOST_AFTER, Break.RESET)


class CutPeer(NodePeer):
    """Breaks the connection at the message with this number, once `number` is set."""

    def __init__(self, nodes: FleetNodes, config: NodeConfig, proxy: FaultyProxy) -> None:
        super().__init__(nodes, 1, config.coordinator)
        self._proxy = proxy
        self.number = self.num_sent = 0
        self.fault: Break | None = None

    def _command(self) -> FleetCommand:
        self.num_sent += 1
        if self.num_sent == self.number:
            self._proxy.armed = self.fault
        return super()._command()

    @property
    def is_armed(self) -> bool:
        """Whether the break has not happened yet."""
        return self._proxy.armed is not None


async def reach(fleet: Fleet, phase: Phase, request_id: str) -> None:
    async for _ in fleet.acquire(phase, request_id).follow():
        pass


@asynccontextmanager
async def cut_fleet(folder: Path) -> AsyncIterator[tuple[Fleet, CutPeer, list[MemberNode]]]:
    """A fleet of two nodes with a proxy before the second one, and that node's peer."""
    configs = [config_of(folder, rank, "127.0.0.1:1") for rank in range(2)]
    members = [this_member(config, boot_id=f"b{rank}") for rank, config in enumerate(configs)]
    socket = folder / "proxy.sock"
    async with AsyncExitStack() as stack:
        simulated = [await stack.enter_async_context(serving_node(config)) for config in configs]
        proxy = FaultyProxy(Path(members[1].coordinator_target.removeprefix("unix:")))
        await proxy.start(socket)
        stack.push_async_callback(proxy.close)
        journal = stack.enter_context(closing(FleetJournal(folder / "fleet.sqlite")))
        nodes = FleetNodes(configs[0], epoch=journal.begin_life("l", attempt=1, num_nodes=2))
        stack.push_async_callback(nodes.close)
        await nodes.join(members[0])
        members[1].coordinator_target = f"unix:{socket}"
        await nodes.join(members[1])
        cut = CutPeer(nodes, configs[1], proxy)
        peers = [NodePeer(nodes, 0, configs[0].coordinator), cut]
        fleet = Fleet(journal, peers, boot_id="l", target="", patience_s=20.0, end=nodes.end)
        stack.push_async_callback(fleet.stop)
        await reach(fleet, Phase.TRAIN, "first")
        yield fleet, cut, simulated


@pytest.mark.parametrize("fault", BREAKS, ids=lambda fault: fault.name)
async def test_a_cut_message_leaves_one_version_and_the_way_on(tmp_path: Path, fault: Break) -> None:
    async with cut_fleet(tmp_path) as (fleet, peer, (first, second)):
        for number in (0, *MESSAGES):
            peer.fault, peer.num_sent, peer.number = fault, 0, number
            for phase, served in ((Phase.ROLLOUT, (0, 0)), (Phase.TRAIN, None)):
                await reach(fleet, phase, f"{phase} {number}")
                assert first.serves == second.serves == served
            assert number or peer.num_sent == NUM_MESSAGES
            assert not peer.is_armed, number
    found = audit_fleet_journal(tmp_path / "fleet.sqlite")
    assert found.violation is None
    assert (found.num_decisions > len(MESSAGES), found.num_unanswered >= len(MESSAGES) - 2) == (True, True)
