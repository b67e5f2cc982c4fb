"""A changeover that a client begins returns at once; the next verb that needs a phase waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tasuki.client import AsyncClient, Client, Phase, StageStatus, TrainingSample
from tasuki.v1 import types_pb2
from tasuki.wire.errors import ChangeoverRunning
from tests.integration.scripted_node import ScriptedNode, scripted_node

SAMPLE = TrainingSample([1, 2], [3, 4], rollout_log_probs=[-0.5, -0.25], advantages=1.0, policy_version=7)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[ScriptedNode]:
    async with scripted_node(tmp_path) as node:
        yield node


@pytest.fixture
async def client(node: ScriptedNode, tmp_path: Path) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(state_dir=tmp_path, timeout_s=20) as client:
        yield client


async def test_it_runs_behind_the_caller_until_a_verb_needs_a_phase(node: ScriptedNode, client: AsyncClient) -> None:
    await client.generate([[1]])
    node.changeover.clear()
    await client.begin_acquire(Phase.TRAIN)
    learning = asyncio.create_task(client.forward_backward([SAMPLE]))
    await asyncio.sleep(0.2)
    assert (node.num_forward_backward, node.phase, learning.done()) == (0, types_pb2.PHASE_ROLLOUT, False)
    node.changeover.set()
    assert (await learning).num_samples == 1
    assert node.num_changeovers == 2


async def test_its_stages_are_those_of_the_acquire_that_follows(node: ScriptedNode, client: AsyncClient) -> None:
    await client.begin_acquire(Phase.ROLLOUT)
    (event,) = await client.acquire(Phase.ROLLOUT)
    assert (StageStatus.of(event.status), event.bytes) == (StageStatus.DONE, 7)
    (held,) = await client.acquire(Phase.ROLLOUT)
    assert StageStatus.of(held.status) is StageStatus.HELD


async def test_a_verb_of_another_phase_comes_after_it(node: ScriptedNode, client: AsyncClient) -> None:
    await client.begin_acquire(Phase.ROLLOUT)
    await client.begin_acquire(Phase.TRAIN)
    await client.generate([[1]])
    assert (node.phase, node.num_changeovers) == (types_pb2.PHASE_ROLLOUT, 3)


async def test_what_it_ended_in_is_raised_by_the_verb_once(node: ScriptedNode, client: AsyncClient) -> None:
    node.refusals.append(ChangeoverRunning("phase TRAIN is under way", changeover_id="c9"))
    await client.begin_acquire(Phase.ROLLOUT)
    with pytest.raises(ChangeoverRunning):
        await client.generate([[1]])
    assert len(await client.generate([[1]])) == 1


async def test_a_client_that_is_closed_leaves_it_to_the_node(node: ScriptedNode, tmp_path: Path) -> None:
    def drive() -> None:
        with Client(state_dir=tmp_path) as client:
            client.generate([[1]])
            node.changeover.clear()
            client.begin_acquire(Phase.TRAIN)

    await asyncio.wait_for(asyncio.to_thread(drive), timeout=60)
    node.changeover.set()
