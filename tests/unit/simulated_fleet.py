"""A fleet in one thread and in virtual time: the real fleet and coordinators, simulated services, and a network that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path

from tasuki.config.schema import FleetConfig
from tasuki.coordinator.operations import FleetHold, Operation
from tasuki.fleet.fleet import Fleet
from tasuki.fleet.journal import FleetAudit, FleetJournal, audit_fleet_journal
from tasuki.fleet.nodes import NodePeer
from tasuki.v1.coordinator_pb2 import NodeState, RunStageResponse, StageEvent
from tasuki.v1.fleet_pb2 import FleetCommand
from tasuki.wire.errors import PeerUnavailable, TasukiError
from tasuki.wire.stages import Phase, Service, Stage
from tests.unit.simulated_faults import Crash, JournalFailpoints
from tests.unit.simulated_node import Answer, SimulatedNode, Simulation

PATIENCE_S = 150.0
_LATENCY_S, _LATE_S, _RESTART_S = 0.001, 0.5, 0.5


class FleetFault(StrEnum):
    """Fault of one message from the fleet to a node."""

    DROP = "the request is lost"
    LOSE = "the answer is lost"
    LATE = "the fleet hears that the connection broke, and the request arrives a moment later"
    DUPLICATE = "the request arrives twice"
    DIFFER = "what the node's SYNC receives is not what the others receive, and nobody on the node notices"
    KILL_COORDINATOR = "the node's coordinator dies before the request arrives"
    KILL_COORDINATOR_WITHIN = "the node's coordinator dies while it carries out the request"
    KILL_TRAINER = "the node's trainer dies"
    KILL_ROLLOUT = "the node's rollout dies"
    CRASH = "the fleet's process dies while the node works"
    CRASH_LATE = "the fleet's process dies, and its request arrives when the next one has looked"


class MemberNode(SimulatedNode):
    """A node of the fleet, with its fence. rank: its number."""

    def __init__(self, folder: Path, rank: int, config: FleetConfig, *, on_served: Callable[[], None]) -> None:
        self.rank, self.config, self._on_served = rank, config, on_served
        self.prefix = f"{rank}-"
        folder.mkdir(exist_ok=True)
        super().__init__(folder, fault=lambda: None, waits_for_room=False)

    async def restart_coordinator(self) -> None:
        self.is_listening = False
        await super().restart_coordinator()

    def _start_coordinator(self) -> None:
        super()._start_coordinator()
        self.is_listening = True
        self.hold = FleetHold(self._journal)

    def _see_served(self, version: int) -> None:
        super()._see_served(version)
        self._on_served()

    @property
    def serves(self) -> tuple[int, int] | None:
        """Version and flavour that clients of this node would be served; None if it serves none."""
        rollout = self.rollout
        return None if rollout is None or rollout.served is None else (rollout.served, rollout.flavour)

    def state(self) -> NodeState:
        return self.node.state()

    def ran(self, stage: Stage) -> RunStageResponse:
        response = RunStageResponse(event=StageEvent(bytes=1000), state=self.state())
        received = self._journal.last(Stage.SYNC)
        if stage is Stage.SYNC and received is not None:
            response.sums.ParseFromString(received.answer)
        return response


class SimulatedNodePeer(NodePeer):
    """The fleet's channel to one node."""

    def __init__(self, fleet: SimulatedFleet, rank: int, epoch: int) -> None:
        self.rank, self._fleet, self._epoch = rank, fleet, epoch
        self._sequence = 0

    async def look(self) -> NodeState:
        async def look(node: MemberNode) -> NodeState:
            return await node.node.look()

        return await self._fleet.call(self.rank, self._command(), look)

    async def run_stage(self, stage: Stage, request_id: str) -> RunStageResponse:
        async def run(node: MemberNode) -> RunStageResponse:
            await _follow(node.node.run_stage(stage, request_id))
            return node.ran(stage)

        return await self._fleet.call(self.rank, self._command(), run)

    async def acquire_train(self, request_id: str) -> NodeState:
        async def acquire(node: MemberNode) -> NodeState:
            await _follow(node.node.acquire(Phase.TRAIN, request_id))
            return node.state()

        return await self._fleet.call(self.rank, self._command(), acquire)

    def _command(self) -> FleetCommand:
        self._sequence += 1
        config = self._fleet.config
        return FleetCommand(name=config.name, attempt=config.attempt, epoch=self._epoch, sequence=self._sequence)


class SimulatedFleet(Simulation):
    """Nodes, and one fleet over them at a time. fault: returns the fault of each message."""

    def __init__(
        self,
        folder: Path,
        *,
        num_nodes: int,
        fault: Callable[[], FleetFault | None] = lambda: None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        super().__init__()
        self.path, self._fault, self._patience_s = folder / "fleet.sqlite", fault, patience_s
        self.deaf_once_decided: int | None = None
        """Rank of a node that becomes unreachable once a decision is made."""
        self.config = FleetConfig(name="f", num_nodes=num_nodes, node_rank=0, leader="127.0.0.1:1", attempt=1)
        self.failpoints = JournalFailpoints(self._crash)
        self.ended: TasukiError | None = None
        self.nodes: list[MemberNode] = []
        for rank in range(num_nodes):
            self.nodes.append(MemberNode(folder / str(rank), rank, self.config, on_served=self._check_served))
        self._start()

    def _start(self) -> None:
        self._crashed = asyncio.Event()
        self._journal = FleetJournal(self.path, failpoints=self.failpoints)
        self.epoch = self._journal.begin_life("fleet", attempt=self.config.attempt, num_nodes=len(self.nodes))
        peers = [SimulatedNodePeer(self, rank, self.epoch) for rank in range(len(self.nodes))]
        self.fleet = Fleet(self._journal, peers, boot_id="fleet", target="", patience_s=self._patience_s, end=self._end)
        self._recovery = self._task(self.fleet.recover())

    def _end(self, error: TasukiError) -> None:
        self.ended = self.ended or error

    async def _bury(self) -> None:
        self._journal.close()
        self._recovery.cancel()
        await self.fleet.stop()

    async def restart(self) -> None:
        await self._bury()
        await asyncio.sleep(_RESTART_S)
        self._start()

    async def acquire(self, phase: Phase, request_id: str) -> TasukiError | None:
        return await self.ask(lambda: self.fleet.acquire(phase, request_id))

    async def learn(self, sample: str) -> None:
        """Makes one optimizer step on every node, repeated until it succeeds."""
        for node in self.nodes:
            for number in range(60):
                error = await node.learn(sample)
                if error is None:
                    break
                assert number < 59, f"node {node.rank} does not learn: {error}"
                await asyncio.sleep(1.0)

    # Network.

    async def call(self, rank: int, command: FleetCommand, act: Callable[[MemberNode], Awaitable[Answer]]) -> Answer:
        self.num_calls += 1
        fault, node = self._fault(), self.nodes[rank]
        await asyncio.sleep(_LATENCY_S)
        await self._strike(node, fault)
        if fault in (FleetFault.LATE, FleetFault.CRASH_LATE):
            self._later(_LATE_S if fault is FleetFault.LATE else 3 * _RESTART_S, lambda: self._arrive(node, command, act))
        if fault is FleetFault.CRASH_LATE:
            self._crash()
            raise Crash
        is_deaf = rank == self.deaf_once_decided and self._journal.decision() is not None
        if is_deaf or fault in (FleetFault.DROP, FleetFault.LATE, FleetFault.KILL_COORDINATOR):
            raise PeerUnavailable("connection reset")
        working = self._arrive(node, command, act)
        if fault is FleetFault.DUPLICATE:
            self._arrive(node, command, act)
        if fault is FleetFault.CRASH:
            self._crash()
            raise Crash
        if fault is FleetFault.KILL_COORDINATOR_WITHIN:
            await asyncio.sleep(0.05)
            await node.restart_coordinator()
        await asyncio.wait({working})
        if working.cancelled() or fault is FleetFault.LOSE:
            raise PeerUnavailable("connection reset")
        return working.result()

    async def _strike(self, node: MemberNode, fault: FleetFault | None) -> None:
        if fault is FleetFault.KILL_COORDINATOR:
            await node.restart_coordinator()
        if fault is FleetFault.KILL_TRAINER:
            node.kill(Service.TRAINER)
        if fault is FleetFault.KILL_ROLLOUT:
            node.kill(Service.ROLLOUT)
        if fault is FleetFault.DIFFER and node.rollout is not None:
            node.rollout.weather.differs = node.rank + 1

    def _arrive(
        self, node: MemberNode, command: FleetCommand, act: Callable[[MemberNode], Awaitable[Answer]]
    ) -> asyncio.Task[Answer]:
        async def carry_out() -> Answer:
            if not node.is_listening:
                raise PeerUnavailable("connection refused")
            node.hold.check(command)
            return await act(node)

        return self._task(carry_out())

    # Invariants.

    def serving(self) -> set[tuple[int, int]]:
        return {served for node in self.nodes if (served := node.serves) is not None}

    def _check_served(self) -> None:
        served = self.serving()
        if len(served) > 1:
            self.broken = AssertionError(f"two versions are served: {served}")

    async def close(self) -> FleetAudit:
        """Stops everything and audits all journals. Raises AssertionError for any broken invariant."""
        await self._bury()
        await self._end_tasks()
        for node in self.nodes:
            await node.close()
        if self.broken is not None:
            raise self.broken
        found = audit_fleet_journal(self.path)
        assert found.violation is None, found.violation
        return found


async def _follow(operation: Operation) -> None:
    async for _ in operation.follow():
        pass
