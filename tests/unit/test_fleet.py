"""The fleet over real coordinators with simulated services, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from tasuki.wire.stages import Service, Stage
from tests.unit.simulated_fleet import FleetFault, SimulatedFleet
from tests.unit.virtual_time import VirtualTimeLoop


def in_virtual_time(work: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(work())


def test_a_node_that_was_away_when_the_fleet_started_is_told_until_it_answers(tmp_path: Path) -> None:
    faults = [FleetFault.DROP] * 4

    async def work() -> None:
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
        await fleet.close()

    in_virtual_time(work)
