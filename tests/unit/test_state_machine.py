"""Hypothesis sends a node any requests in any order while calls, services, disk and coordinator fail; no promise is ever broken.

Promises are asserted where they are kept. The simulated services check that a version is received before it is served, no sample is trained
twice, the GPUs have one holder and versions grow. The command gate counts executions, and the journal is audited at the end. `make test`
runs 500 steps, `make chaos` 10,000.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tasuki.coordinator.phases import phase_of
from tasuki.wire.errors import (
    DeadlineExceeded,
    DiskFull,
    EnginePoisoned,
    OutOfGpuMemory,
    PeerUnavailable,
    StageOrder,
    WeightsCorrupt,
    WrongPhase,
)
from tasuki.wire.stages import Phase, Service, Stage
from tests.extent import IS_WHOLE
from tests.unit.memory_folder import memory_folder
from tests.unit.simulated_faults import CrashPoint, Fault
from tests.unit.simulated_node import SimulatedNode
from tests.unit.virtual_time import VirtualTimeLoop

MIN_STEPS = 10_000 if IS_WHOLE else 500
REFUSALS = (OutOfGpuMemory, WrongPhase)
"""Errors that the gate repeats to everybody who repeats the command."""
EXPECTED = (DeadlineExceeded, DiskFull, EnginePoisoned, OutOfGpuMemory, PeerUnavailable, WeightsCorrupt)
"""Errors in which a changeover may end under faults; any other is the coordinator's bug."""


def faults(num_calls: int) -> st.SearchStrategy[list[Fault | None]]:
    """Draws the faults of the next calls in order, mostly none."""

    def draw(seed: int) -> list[Fault | None]:
        random = Random(seed)
        share = random.choice((0.0, 0.1, 0.2))
        return [random.choice(list(Fault)) if random.random() < share else None for _ in range(num_calls)]

    return st.integers(0, 2**32).map(draw)


class NodeMachine(RuleBasedStateMachine):
    num_steps = num_changeovers = num_crashes = num_kills = num_faults = 0

    @initialize(waits_for_room=st.booleans())
    def start(self, waits_for_room: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=memory_folder()))
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.faults: list[Fault | None] = []
        self.number = 0
        self.num_learned = 0
        self.pending = ""
        self.node = self.runner.run(self._start(waits_for_room))

    async def _start(self, waits_for_room: bool) -> SimulatedNode:
        return SimulatedNode(self.folder, fault=self._next_fault, waits_for_room=waits_for_room)

    def _next_fault(self) -> Fault | None:
        fault = self.faults.pop(0) if self.faults else None
        NodeMachine.num_faults += fault is not None
        return fault

    def _id(self, name: str) -> str:
        self.number += 1
        return f"{name} {self.number}"

    def teardown(self) -> None:
        if not hasattr(self, "node"):
            return
        try:
            self.runner.run(self._come_to_rest())
        finally:
            self.runner.close()
            shutil.rmtree(self.folder)

    async def _come_to_rest(self) -> None:
        """Checks that without faults every request succeeds at once."""
        self.faults, self.node.failpoints.armed = [], None
        # A trainer that restarted while rollout serves may have learned since; its version is served from the next changeover on.
        for number, phase in enumerate((Phase.ROLLOUT, Phase.TRAIN, Phase.ROLLOUT)):
            assert await self.node.acquire(phase, f"at last {number}") is None
        assert self.node.rollout is not None and self.node.rollout.served == len(self.node.disk.steps)
        assert await self.node.acquire(Phase.TRAIN, "at the very last") is None
        found = await self.node.close()
        assert found.num_unanswered == 0
        NodeMachine.num_changeovers += found.num_changeovers
        NodeMachine.num_crashes += self.node.num_crashes
        NodeMachine.num_kills += self.node.num_kills

    @rule(phase=st.sampled_from(Phase), faults=faults(15))
    def acquire(self, phase: Phase, faults: list[Fault | None]) -> None:
        self.faults = faults
        error = self.runner.run(self.node.acquire(phase, self._id("acquire")))
        assert error is None or isinstance(error, EXPECTED), repr(error)

    @rule(faults=faults(5))
    def next_single_stage(self, faults: list[Fault | None]) -> None:
        """Runs the next stage; if the node has moved since it was looked at, the refusal names the stage to run."""
        at = Stage.of(self.node.node.state().next_stage) or Stage.LOAD_WEIGHTS
        self.faults = faults
        error = self.runner.run(self.node.run_stage(at, self._id("hand")))
        if isinstance(error, StageOrder) and error.metadata.get("allowed") in list(Stage):
            self.runner.run(self.node.run_stage(Stage(error.metadata["allowed"]), self._id("hand")))

    @rule(stage=st.sampled_from(Stage))
    def any_single_stage(self, stage: Stage) -> None:
        self.runner.run(self.node.run_stage(stage, self._id("hand")))

    @rule(faults=faults(2))
    def learn(self, faults: list[Fault | None]) -> None:
        """Sends a sample again as the same command if its answer was lost, as the client does."""
        self.faults = faults
        self.pending = self.pending or self._id("sample")
        error = self.runner.run(self.node.learn(self.pending))
        assert error is None or isinstance(error, (*EXPECTED, WrongPhase)), repr(error)
        self.num_learned += error is None
        if error is None or isinstance(error, REFUSALS):
            self.pending = ""

    @rule(service=st.sampled_from(Service))
    def kill(self, service: Service) -> None:
        self.runner.run(self._kill(service))

    async def _kill(self, service: Service) -> None:
        self.node.kill(service)

    @rule(point=st.sampled_from(CrashPoint), passes=st.integers(0, 6), is_full=st.booleans())
    def next_journal_write_fails(self, point: CrashPoint, passes: int, is_full: bool) -> None:
        self.node.failpoints.armed, self.node.failpoints.is_full = (point, passes), is_full

    @rule()
    def restart_coordinator(self) -> None:
        self.runner.run(self.node.restart_coordinator())

    @rule(seconds=st.sampled_from((0.05, 0.3, 2.0)))
    def wait(self, seconds: float) -> None:
        self.runner.run(asyncio.sleep(seconds))

    @precondition(lambda self: hasattr(self, "node"))
    @invariant()
    def nothing_is_broken(self) -> None:
        NodeMachine.num_steps += 1
        assert self.node.broken is None
        assert len(self.node.disk.steps) in (self.num_learned, self.num_learned + bool(self.pending))
        at = Stage.of(self.node.node.state().stage)
        assert at is None or phase_of(at) in (None, *Phase)


@pytest.mark.timeout(600)  # to reproduce and shrink failures
def test_thousands_of_steps_break_no_promise() -> None:
    run_state_machine_as_test(
        NodeMachine,
        settings=settings(
            derandomize=True,
            database=None,
            deadline=None,
            max_examples=MIN_STEPS // 20,
            stateful_step_count=50,
            suppress_health_check=list(HealthCheck),
        ),
    )
    counts = {name: value for name, value in vars(NodeMachine).items() if name.startswith("num_")}
    assert NodeMachine.num_steps >= MIN_STEPS, counts
    assert min(counts.values()) > MIN_STEPS // 100, counts
