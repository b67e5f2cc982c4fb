"""Every fault of every stage's call, one at a time: the phase is reached, and no promise is broken. In virtual time.

The simulated services have the real command gate and stage rules; the journal and the services' logs are audited at the end.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasuki.coordinator.phases import path
from tasuki.rpc.commands import _name
from tasuki.wire.errors import OutOfGpuMemory
from tasuki.wire.stages import HOLDS, RULES, Phase, Service, Stage
from tests.unit.simulated_faults import Fault
from tests.unit.simulated_node import SimulatedNode
from tests.unit.virtual_time import VirtualTimeLoop

TO_ROLLOUT = path(HOLDS[Phase.TRAIN], Phase.ROLLOUT)
ANY = "any command"
Run = Callable[..., None]


class StruckNode(SimulatedNode):
    """Faults come with the call of a command, once each, and only in the order given."""

    def __init__(self, folder: Path) -> None:
        self.strikes: list[tuple[str, Fault]] = []
        self._next: Fault | None = None
        super().__init__(folder, fault=lambda: self._next, waits_for_room=True)

    async def call(self, service: Service, method: str, request: Any, timeout: float) -> Any:
        self._next = None
        if self.strikes and hasattr(request, "command") and self.strikes[0][0] in (_name(request), ANY):
            self._next = self.strikes.pop(0)[1]
        return await super().call(service, method, request, timeout)


async def strike(folder: Path, stage: Stage, *strikes: tuple[str, Fault]) -> None:
    """Strikes on the way to the phase after `stage`, then goes both ways without faults."""
    node = StruckNode(folder)
    assert await node.learn("sample") is None
    target = Phase.ROLLOUT if stage in TO_ROLLOUT else Phase.TRAIN
    if target is Phase.TRAIN:
        assert await node.acquire(Phase.ROLLOUT, "before") is None
    node.strikes = list(strikes)
    error = await node.acquire(target, "struck")
    assert not node.strikes, "every fault has happened"
    if strikes[0][1] is Fault.REFUSE:
        assert error is None or isinstance(error, OutOfGpuMemory), repr(error)
    else:
        assert (error, Phase.of(node.node.state().phase)) == (None, target)
    for number, phase in enumerate((Phase.TRAIN, Phase.ROLLOUT)):
        assert await node.acquire(phase, f"at last {number}") is None
    assert node.rollout is not None and node.rollout.served == node.node.state().policy_version == 1
    assert (await node.close()).num_unanswered == 0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        yield lambda *strikes: runner.run(strike(tmp_path, *strikes))


@pytest.mark.parametrize("stage", RULES)
@pytest.mark.parametrize("fault", Fault)
def test_one_fault_in_a_stage(fault: Fault, stage: Stage, run: Run) -> None:
    if fault is not Fault.CORRUPT or stage is Stage.SYNC:
        run(stage, (stage, fault))


@pytest.mark.parametrize("num_undone", range(3))
@pytest.mark.parametrize("fault", [fault for fault in Fault if fault not in (Fault.CORRUPT, Fault.REFUSE)])
def test_one_fault_in_an_undo(fault: Fault, num_undone: int, run: Run) -> None:
    undone = [(ANY, Fault.SLOW)] * num_undone
    run(Stage.RESUME_KV, (Stage.RESUME_KV, Fault.REFUSE), *undone, (ANY, fault))
