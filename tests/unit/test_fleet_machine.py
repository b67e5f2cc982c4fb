"""Hypothesis sends a fleet any requests in any order while messages, nodes and the fleet fail; never are two versions served.

The served version is checked whenever a node begins to serve; at the end every journal is audited.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tasuki.memory.stages import Phase, Service
from tasuki.wire.errors import TasukiError
from tests.extent import IS_WHOLE
from tests.unit.memory_folder import memory_folder
from tests.unit.simulated_fleet import FleetFault, SimulatedFleet
from tests.unit.virtual_time import VirtualTimeLoop

NUM_NODES = 2
FAULTS = st.lists(st.sampled_from([None, None, None, *FleetFault]), max_size=8)


class FleetMachine(RuleBasedStateMachine):
    num_steps = num_faults = num_served = 0

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=memory_folder()))
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.faults: list[FleetFault | None] = []
        self.number = self.num_learned = 0
        self.fleet = self.runner.run(self._make())

    async def _make(self) -> SimulatedFleet:
        return SimulatedFleet(self.folder, num_nodes=NUM_NODES, fault=self._next_fault)

    def _next_fault(self) -> FleetFault | None:
        fault = self.faults.pop() if self.faults else None
        type(self).num_faults += fault is not None
        return fault

    def _name(self, what: str) -> str:
        self.number += 1
        return f"{what} {self.number}"

    @rule(phase=st.sampled_from(list(Phase)), faults=FAULTS)
    def acquire(self, phase: Phase, faults: list[FleetFault | None]) -> None:
        self.faults = faults
        error = self.runner.run(self.fleet.acquire(phase, self._name(phase)))
        self.faults = []
        if error is None:
            assert self.fleet.fleet.state().phase is phase
            type(self).num_served += phase is Phase.ROLLOUT

    @rule()
    def learn(self) -> None:
        async def learn() -> None:
            if await self.fleet.acquire(Phase.TRAIN, self._name("to learn")) is None:
                await self.fleet.learn(f"sample {self.num_learned}")
                self.num_learned += 1

        self.runner.run(learn())

    @rule(rank=st.integers(0, NUM_NODES - 1), service=st.sampled_from(list(Service)))
    def kill(self, rank: int, service: Service) -> None:
        async def kill() -> None:
            self.fleet.nodes[rank].kill(service)

        self.runner.run(kill())

    @rule(rank=st.integers(0, NUM_NODES - 1))
    def restart_coordinator(self, rank: int) -> None:
        self.runner.run(self.fleet.nodes[rank].restart_coordinator())

    @rule()
    def restart_fleet(self) -> None:
        self.runner.run(self.fleet.restart())

    @rule(seconds=st.sampled_from((0.01, 1.0, 60.0)))
    def wait(self, seconds: float) -> None:
        self.runner.run(asyncio.sleep(seconds))

    @invariant()
    def serves_one_version(self) -> None:
        if hasattr(self, "fleet"):
            assert len(self.fleet.serving()) <= 1
            assert self.fleet.broken is None, self.fleet.broken
            type(self).num_steps += 1

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            try:
                self.runner.run(self._end())
            finally:
                self.runner.close()
                shutil.rmtree(self.folder)

    async def _end(self) -> None:
        """Checks that without faults the fleet reaches either phase, unless it has ended."""
        self.faults = []
        if self.fleet.ended is None:
            for phase in (Phase.ROLLOUT, Phase.TRAIN):
                error: TasukiError | None = None
                for attempt in range(5):
                    error = await self.fleet.acquire(phase, f"at last {phase} {attempt}")
                    if error is None:
                        break
                assert error is None or self.fleet.ended is not None, error
        await self.fleet.close()


def test_any_requests_in_any_order_leave_one_version() -> None:
    run_state_machine_as_test(
        FleetMachine,
        settings=settings(
            max_examples=200 if IS_WHOLE else 60,
            stateful_step_count=25 if IS_WHOLE else 15,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=not IS_WHOLE,
        ),
    )
    assert FleetMachine.num_steps > 100
    assert FleetMachine.num_served > 3
    assert FleetMachine.num_faults > 20
