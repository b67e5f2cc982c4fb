"""The fleet over real coordinators with simulated services, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from tasuki.memory.stages import Phase, Stage
from tests.unit.simulated_fleet import SimulatedFleet
from tests.unit.virtual_time import VirtualTimeLoop


def in_virtual_time(work: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(work())


def test_all_nodes_come_to_rollout_and_back(tmp_path: Path) -> None:
    async def work() -> None:
        fleet = SimulatedFleet(tmp_path, num_nodes=3)
        for step in range(2):
            await fleet.learn(f"sample {step}")
            assert await fleet.acquire(Phase.ROLLOUT, f"r{step}") is None
            assert [node.serves for node in fleet.nodes] == [(step + 1, 0)] * 3
            state = fleet.fleet.state()
            assert (state.phase, state.policy_version) == (Phase.ROLLOUT, step + 1)
            assert await fleet.acquire(Phase.TRAIN, f"t{step}") is None
            assert fleet.fleet.state().at is Stage.LOAD_TRAINER
        found = await fleet.close()
        assert (found.num_decisions, found.num_done, found.num_unanswered) == (2, 4, 0)

    in_virtual_time(work)
