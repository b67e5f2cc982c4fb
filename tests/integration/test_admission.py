"""A coordinator process, and services with real CPU arenas under a shared budget."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tasuki.config.save import save_config
from tasuki.config.schema import MemoryConfig, ModelConfig, NodeConfig
from tasuki.coordinator.journal import Journal
from tasuki.memory.allocator import NativeAllocator
from tasuki.memory.arena import Keep, set_host_budget, totals
from tasuki.memory.tags import MemoryTag
from tasuki.v1.types_pb2 import (
    PHASE_ROLLOUT,
    PHASE_TRAIN,
    STAGE_LOAD_TRAINER,
    STAGE_OFFLOAD,
    STAGE_PAUSE_WEIGHTS,
    STAGE_UNSPECIFIED,
)
from tasuki.wire.errors import OutOfGpuMemory
from tests.integration.coordinator_process import Node, coordinated
from tests.integration.stage_services import StageService, serving

MIB = 2**20
TRAINER = {MemoryTag.WEIGHTS: 8 * MIB, MemoryTag.GRADIENTS: 8 * MIB, MemoryTag.OPTIMIZER: 16 * MIB}
ENGINE = {MemoryTag.WEIGHTS: 4 * MIB, MemoryTag.KV_CACHE: 24 * MIB}


class Arenas:
    """Filled tags of both services: the trainer's awake, the engine's asleep."""

    def __init__(self) -> None:
        self.trainer = NativeAllocator(tags=list(TRAINER), device="cpu", keep={MemoryTag.WEIGHTS: Keep.CONTENT})
        self.engine = NativeAllocator(tags=list(ENGINE), device="cpu")
        self.blocks = {(self.trainer, tag): self.trainer.arena(tag).allocate(size) for tag, size in TRAINER.items()}
        self.blocks |= {(self.engine, tag): self.engine.arena(tag).allocate(size) for tag, size in ENGINE.items()}
        self.engine.pause(list(ENGINE))
        self._others = totals().mapped_bytes - sum(self.mapped().values())
        """Mapped bytes of arenas that other tests of this process left."""

    def limit(self, budget_bytes: int) -> None:
        set_host_budget(self._others + budget_bytes)

    def mapped(self) -> dict[str, int]:
        usages = {"trainer": self.trainer.usage(), "engine": self.engine.usage()}
        return {f"{name} {one.tag}": one.mapped_bytes for name, usage in usages.items() for one in usage}

    def close(self) -> None:
        for (allocator, tag), address in self.blocks.items():
            allocator.resume([tag])
            allocator.arena(tag).free(address)
        self.trainer.close()
        self.engine.close()


@pytest.fixture
def arenas() -> Iterator[Arenas]:
    arenas = Arenas()
    yield arenas
    set_host_budget(0)
    arenas.close()


@asynccontextmanager
async def node_with(tmp_path: Path, arenas: Arenas, *, budget_bytes: int) -> AsyncIterator[Node]:
    """Limits both services' arenas together: they are in one process here, while a real node limits each."""
    memory = MemoryConfig(host_budget_bytes=budget_bytes)
    config = NodeConfig(state_dir=tmp_path / "state", model=ModelConfig(path=tmp_path), memory=memory)
    config.state_dir.mkdir()
    save_config(config, config.state_dir / "node.toml")
    arenas.limit(budget_bytes)
    async with serving(config) as (trainer, rollout):
        trainer.arenas, rollout.arenas = arenas.trainer, arenas.engine
        async with coordinated(config, trainer, rollout) as node:
            await node.settled()
            yield node
            await node.channel.close(None)
            await node.stop()


async def change_budget(node: Node, arenas: Arenas, num_bytes: int) -> None:
    """Changes the budget as an operator does, by the file and a restart of the coordinator; the services' limits follow."""
    save_config(
        node.config.model_copy(update={"memory": MemoryConfig(host_budget_bytes=num_bytes)}),
        node.config.state_dir / "node.toml",
    )
    arenas.limit(num_bytes)
    await node.restart(signal.SIGTERM)


def commands(service: StageService) -> int:
    return len(service.commands)


async def test_budget_that_is_too_small_is_refused_and_a_raised_one_is_enough(tmp_path: Path, arenas: Arenas) -> None:
    held = 32 * MIB
    async with node_with(tmp_path, arenas, budget_bytes=34 * MIB) as node:
        before = arenas.mapped()
        with pytest.raises(OutOfGpuMemory, match="RESUME_WEIGHTS was not begun, there is no room for weights") as refused:
            await node.acquire(PHASE_ROLLOUT)
        numbers = {key: int(refused.value.metadata[key]) for key in ("needed_bytes", "free_bytes", "short_bytes")}
        short = held + 4 * MIB - 34 * MIB
        assert numbers == {"needed_bytes": 4 * MIB, "free_bytes": 34 * MIB - held, "short_bytes": short}
        assert f"raise memory.host_budget_bytes to {34 * MIB + short}" in refused.value.message
        assert (arenas.mapped(), commands(node.rollout), node.rollout.stage) == (before, 0, STAGE_UNSPECIFIED)
        assert ((await node.state()).phase, node.trainer.stage) == (PHASE_TRAIN, STAGE_LOAD_TRAINER)
        await change_budget(node, arenas, 34 * MIB + short)
        assert (await node.acquire(PHASE_ROLLOUT))[-1].state.phase == PHASE_ROLLOUT
        awake = {name: size for name, size in arenas.mapped().items() if size}
        assert awake == {"engine weights": 4 * MIB, "engine kv_cache": 24 * MIB}


async def test_stage_that_was_refused_begins_when_memory_becomes_free(tmp_path: Path, arenas: Arenas) -> None:
    """The trainer has grown since the last changeover, as after loading a reference policy."""
    async with node_with(tmp_path, arenas, budget_bytes=40 * MIB) as node:
        await node.acquire(PHASE_ROLLOUT)
        await node.acquire(PHASE_TRAIN)
        set_host_budget(0)
        more = arenas.trainer.arena(MemoryTag.WEIGHTS).allocate(16 * MIB)
        with pytest.raises(OutOfGpuMemory, match="RESUME_WEIGHTS was not begun") as refused:
            await node.acquire(PHASE_ROLLOUT)
        assert refused.value.metadata["free_bytes"] == "0"
        assert "trainer weights=25165824" in refused.value.metadata["held"]
        assert (await node.state()).phase == PHASE_TRAIN
        arenas.trainer.arena(MemoryTag.WEIGHTS).free(more)
        assert (await node.acquire(PHASE_ROLLOUT))[-1].state.phase == PHASE_ROLLOUT


async def test_trainer_without_room_stays_away_and_comes_back_when_there_is(tmp_path: Path, arenas: Arenas) -> None:
    async with node_with(tmp_path, arenas, budget_bytes=40 * MIB) as node:
        await node.acquire(PHASE_ROLLOUT)
        await change_budget(node, arenas, 30 * MIB)
        with pytest.raises(OutOfGpuMemory, match="LOAD_TRAINER was not begun") as refused:
            await node.acquire(PHASE_TRAIN)
        assert int(refused.value.metadata["needed_bytes"]) == 32 * MIB
        assert ((await node.state()).stage, node.trainer.stage) == (STAGE_PAUSE_WEIGHTS, STAGE_OFFLOAD)
        assert not any(arenas.mapped().values())
        await change_budget(node, arenas, 40 * MIB)  # the coordinator continues from the node's stage
        assert (await node.state()).phase == PHASE_TRAIN


async def test_numbers_of_a_refusal_are_in_the_journal_and_no_stage_is(tmp_path: Path, arenas: Arenas) -> None:
    async with node_with(tmp_path, arenas, budget_bytes=34 * MIB) as node:
        with pytest.raises(OutOfGpuMemory):
            await node.acquire(PHASE_ROLLOUT)
        state_dir = node.config.state_dir
    journal = Journal(state_dir / "journal.sqlite")
    written = journal.changeovers(limit=1)[0]
    journal.close()
    assert (written.error_reason, {event.stage for event in written.events}) == ("GPU_MEMORY", {"LOAD_WEIGHTS"})
    assert "cpu: 4.2 MB needed, 2.1 MB free, 2.1 MB short" in written.error_message
