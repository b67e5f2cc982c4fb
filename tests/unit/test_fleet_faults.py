"""A fleet under faults: every message lost, every process killed, every journal write interrupted; never are two versions served.

`make test` runs a sample of the fault points and seeds, `make chaos` all of them.
"""

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tasuki.fleet.audit import FleetAudit
from tasuki.wire.stages import Phase, Service, Stage
from tests.extent import IS_WHOLE
from tests.unit.memory_folder import memory_folder
from tests.unit.simulated_fleet import FleetFault, SimulatedFleet
from tests.unit.virtual_time import VirtualTimeLoop

NUM_SEEDS, NUM_CHUNKS, NUM_STEPS = (150, 15, 3) if IS_WHOLE else (3, 3, 2)
STRIDE = 1 if IS_WHOLE else 11
"""Runs one in STRIDE of the fault points."""
POINTS = ("intend", "intended", "begin", "begun", "end", "ended", "note", "noted", "decide", "decided")


def in_virtual_time(work: Callable[[], Awaitable[FleetAudit]]) -> FleetAudit:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work())


async def reach(fleet: SimulatedFleet, phase: Phase, request_id: str) -> None:
    """Repeats the request after an error, as a user does."""
    for attempt in range(50):
        error = await fleet.acquire(phase, f"{request_id} {attempt}")
        if error is None:
            return
        assert fleet.ended is None, fleet.ended
    raise AssertionError(f"phase {phase} was not reached: {error}")


async def round_trip(fleet: SimulatedFleet, step: int) -> None:
    await fleet.learn(f"sample {step}")
    await reach(fleet, Phase.ROLLOUT, f"serve {step}")
    assert [node.serves for node in fleet.nodes] == [(step + 1, 0)] * len(fleet.nodes)
    await reach(fleet, Phase.TRAIN, f"train {step}")
    assert fleet.serving() == set()


class At:
    """Injects one fault, at the message with this number."""

    def __init__(self, place: int, fault: FleetFault) -> None:
        self._place, self._fault, self._number = place, fault, 0
        self.is_on = False

    def __call__(self) -> FleetFault | None:
        self._number += self.is_on
        return self._fault if self.is_on and self._number == self._place else None


async def once(place: int, fault: FleetFault) -> tuple[FleetAudit, int]:
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        at = At(place, fault)
        fleet = SimulatedFleet(Path(folder), num_nodes=2, fault=at)
        await reach(fleet, Phase.TRAIN, "first")
        at.is_on, before = True, fleet.num_calls
        await round_trip(fleet, 0)
        num_calls, at.is_on = fleet.num_calls - before, False
        await round_trip(fleet, 1)
        return await fleet.close(), num_calls


NUM_MESSAGES = 22
"""Messages of a fault-free round trip of two nodes: per node, one look in each direction and nine stages."""


def test_a_round_trip_takes_so_many_messages() -> None:
    found, num_calls = asyncio.Runner(loop_factory=VirtualTimeLoop).run(once(0, FleetFault.DROP))
    assert (num_calls, found.num_unanswered, found.num_decisions) == (NUM_MESSAGES, 0, 2)


@pytest.mark.parametrize("fault", list(FleetFault), ids=lambda fault: fault.name)
def test_one_fault_at_any_message_leaves_one_version_and_the_way_on(fault: FleetFault) -> None:
    for place in range(1, NUM_MESSAGES + 1, STRIDE):
        found, _ = asyncio.Runner(loop_factory=VirtualTimeLoop).run(once(place, fault))
        assert found.num_decisions >= 2, place


async def interrupted(point: str, number: int, *, is_full: bool) -> FleetAudit:
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        fleet = SimulatedFleet(Path(folder), num_nodes=2)
        await reach(fleet, Phase.TRAIN, "first")
        fleet.failpoints.is_full, fleet.failpoints.armed = is_full, (point, number)
        await round_trip(fleet, 0)
        fleet.failpoints.armed = None
        await round_trip(fleet, 1)
        return await fleet.close()


@pytest.mark.parametrize("is_full", [False, True], ids=["killed", "disk full"])
@pytest.mark.parametrize("point", POINTS)
def test_a_write_that_is_cut_off_leaves_one_version_and_the_way_on(point: str, is_full: bool) -> None:
    for number in range(12) if IS_WHOLE else [POINTS.index(point)]:
        found = in_virtual_time(lambda number=number: interrupted(point, number, is_full=is_full))
        assert found.num_decisions >= 2


async def simulate(seed: int) -> FleetAudit:
    """Runs a few rounds in which about one message in ten fails, and the fleet sometimes dies at a write."""
    draw = random.Random(seed)
    share, is_calm = draw.choice((0.03, 0.1, 0.2)), False

    def fault() -> FleetFault | None:
        return None if is_calm or draw.random() > share else draw.choice(list(FleetFault))

    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        fleet = SimulatedFleet(Path(folder), num_nodes=3, fault=fault)
        for step in range(NUM_STEPS):
            if draw.random() < share:
                fleet.failpoints.armed = draw.choice(POINTS), draw.randrange(12)
            await fleet.learn(f"sample {step}")
            await reach(fleet, Phase.ROLLOUT, f"serve {step}")
            await reach(fleet, Phase.TRAIN, f"train {step}")
        is_calm, fleet.failpoints.armed = True, None
        await round_trip(fleet, NUM_STEPS)
        return await fleet.close()


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_every_seed_ends_with_one_version_and_clean_journals(chunk: int) -> None:
    for seed in range(chunk, NUM_SEEDS, NUM_CHUNKS):
        assert in_virtual_time(lambda seed=seed: simulate(seed)).num_decisions > NUM_STEPS, seed


def test_a_node_that_was_away_when_the_fleet_started_is_told_until_it_answers(tmp_path: Path) -> None:
    faults = [FleetFault.DROP] * 4

    async def work() -> FleetAudit:
        fleet = SimulatedFleet(tmp_path, num_nodes=2, fault=lambda: faults.pop() if faults else None)
        await asyncio.sleep(0.2)
        assert fleet.fleet.state().last_error == "PEER_UNAVAILABLE: node 0: connection reset"
        await asyncio.sleep(5.0)
        assert (Stage.of(fleet.fleet.state().stage), fleet.fleet.state().last_error) == (Stage.LOAD_TRAINER, "")
        fleet.nodes[0].kill(Service.TRAINER)
        assert Stage.of((await fleet.fleet.look()).stage) is None
        assert fleet.nodes[0].node.state().last_error.startswith("PEER_UNAVAILABLE: ")
        await asyncio.sleep(60.0)
        assert Stage.of((await fleet.fleet.look()).stage) is Stage.LOAD_TRAINER
        assert fleet.nodes[0].node.state().last_error == ""
        return await fleet.close()

    in_virtual_time(work)
