"""A node in virtual time under random faults: it always reaches the requested phase, and learns every sample once.

`make test` runs 30 seeds, `make chaos` 300.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

import pytest

from tasuki.coordinator.audit.replay import Audit
from tasuki.wire.errors import OutOfGpuMemory, WrongPhase
from tasuki.wire.stages import Phase
from tests.extent import IS_WHOLE
from tests.unit.memory_folder import memory_folder
from tests.unit.simulated_faults import CrashPoint, Fault
from tests.unit.simulated_node import SimulatedNode
from tests.unit.virtual_time import VirtualTimeLoop

REFUSALS = (OutOfGpuMemory, WrongPhase)
"""Errors that the gate repeats to everybody who repeats the command."""
NUM_SEEDS, NUM_CHUNKS, NUM_STEPS = 300 if IS_WHOLE else 30, 10, 4


async def simulate(seed: int, folder: Path) -> Audit:
    """Runs a few rounds of learning and serving, in which about one call in twenty fails."""
    draw = random.Random(seed)
    share = draw.choice((0.0, 0.05, 0.15, 0.3))
    calm = False

    def fault() -> Fault | None:
        return None if calm or draw.random() > share else draw.choice(list(Fault))

    node = SimulatedNode(folder, fault=fault, waits_for_room=draw.random() < 0.5)
    for step in range(NUM_STEPS):
        if draw.random() < share:
            node.failpoints.armed = draw.choice(list(CrashPoint)), draw.randrange(8)
            node.failpoints.is_full = draw.random() < 0.3
        await reach(node, Phase.TRAIN, f"train {step}")
        await learn(node, f"sample {step}")
        await reach(node, Phase.ROLLOUT, f"serve {step}")
    calm, node.failpoints.armed = True, None
    assert await node.acquire(Phase.ROLLOUT, "at last") is None
    assert node.rollout is not None
    assert node.rollout.served == NUM_STEPS == len(node.disk.steps)
    assert await node.acquire(Phase.TRAIN, "at the very last") is None
    assert Phase.of(node.node.state().phase) is Phase.TRAIN
    found = await node.close()
    assert found.num_unanswered == 0
    return found


async def learn(node: SimulatedNode, sample: str) -> None:
    """Repeats a command as the client does: the same one after a lost answer, a new one after a refusal."""
    refusals = 0
    for attempt in range(100):
        error = await node.learn(f"{sample} {refusals}")
        if error is None:
            return
        refusals += isinstance(error, REFUSALS)
        await asyncio.sleep(1.0)
        await reach(node, Phase.TRAIN, f"{sample} again {attempt}")
    raise AssertionError(f"{sample} was not learned")


async def reach(node: SimulatedNode, phase: Phase, request_id: str) -> None:
    """Repeats the request after an error, as a user does."""
    for attempt in range(50):
        if await node.acquire(phase, f"{request_id} {attempt}") is None:
            return
    raise AssertionError(f"phase {phase} was not reached")


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_every_seed_ends_in_the_asked_phase_with_a_clean_journal(chunk: int) -> None:
    num_changeovers = 0
    for seed in range(chunk, NUM_SEEDS, NUM_CHUNKS):
        with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
            try:
                with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
                    num_changeovers += runner.run(simulate(seed, Path(folder))).num_changeovers
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
    assert num_changeovers > 2 * NUM_STEPS * NUM_SEEDS // NUM_CHUNKS - NUM_SEEDS
