"""A client whose services restart, and one whose node ends or is replaced on the same folder."""

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from tasuki.client import AsyncClient, Phase
from tasuki.client.connection import Connection
from tasuki.config.lock import NODE_LOCK, StateLock, lock_path
from tasuki.v1 import types_pb2
from tasuki.wire.errors import DeadlineExceeded, NodeDown, PeerUnavailable, StaleEpoch, TasukiError, to_status
from tests.integration.scripted_node import scripted_node
from tests.integration.test_client import SAMPLE
from tests.limits import limit_s


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_call_waits_for_a_service_that_restarts_beyond_its_deadline_and_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    monkeypatch.setattr("tasuki.client.connection.READ_TIMEOUT_S", 0.3)
    names = ("coordinator", "trainer") if is_lost else ("coordinator", "trainer", "rollout")
    client = AsyncClient(state_dir=tmp_path, timeout_s=0.5, recovery_timeout_s=60)
    async with scripted_node(tmp_path, services=names) as node, client:
        node.changeover.clear()
        acquired = asyncio.create_task(client.acquire(Phase.TRAIN))
        if is_lost:
            await asyncio.sleep(2.0)
            await node.serve("rollout")
            node.changeover.set()
            assert len(await acquired) == 1
        else:
            with pytest.raises(DeadlineExceeded):
                await acquired


@pytest.mark.parametrize("cause", ["cancelled", "broken off", "late"])
async def test_a_call_that_grpc_gives_up_is_given_again_and_at_its_deadline_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    if cause == "late":
        monkeypatch.setattr("tasuki.client.connection.READ_TIMEOUT_S", 0.1)
    given: list[str] = []

    async def give(command: types_pb2.CommandId, timeout_s: float) -> str:
        given.append(command.request_id)
        if len(given) == 1 or cause == "late":
            if cause == "broken off":
                raise AioRpcError(grpc.StatusCode.INTERNAL, Metadata(), Metadata(), details="Internal error from Core")
            if cause == "late":
                await asyncio.sleep(timeout_s)
            raise asyncio.CancelledError
        return "answer"

    async with scripted_node(tmp_path, services=["coordinator"]) as node, AsyncExitStack() as stack:
        timeout_s = 0.1 if cause == "late" else 60
        connection = Connection(node.targets["coordinator"], timeout_s=timeout_s, recovery_timeout_s=0.5)
        stack.push_async_callback(connection.close)
        if cause == "late":
            with pytest.raises(DeadlineExceeded):
                await connection.command(give)
        else:
            assert await connection.command(give) == "answer"
            assert given == [given[0]] * 2


async def test_a_service_that_is_restarted_for_an_epoch_of_no_coordinator_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals: list[TasukiError] = [StaleEpoch("epoch 1 is over: this service has seen 20", epoch=1, current_epoch=20)] * 2
    given: list[str] = []

    async def give(command: types_pb2.CommandId, timeout_s: float) -> str:
        given.append(command.request_id)
        if refusals:
            status = to_status(refusals.pop())
            raise AioRpcError(status.code, Metadata(), Metadata(*status.trailing_metadata), details=status.details)
        return "done"

    async with scripted_node(tmp_path, services=["coordinator"]) as node:
        connection = Connection(node.targets["coordinator"], timeout_s=60, recovery_timeout_s=60)
        assert await connection.command(give) == "done"
        await connection.close()
    assert len(given) == 3 and len(set(given)) == 1


async def test_a_node_that_was_restarted_is_not_trained_by_the_client_of_the_one_before(tmp_path: Path) -> None:
    async with scripted_node(tmp_path) as node, AsyncClient(state_dir=tmp_path, timeout_s=20) as client:
        node.instance_id = "first"
        await client.generate([[1]])
        node.instance_id, node.phase = "second", types_pb2.PHASE_TRAIN
        with pytest.raises(NodeDown, match="restarted from its initial model"):
            await client.forward_backward([SAMPLE])
        assert node.num_forward_backward == 0


@pytest.mark.parametrize("refusal", [PeerUnavailable("gone"), StaleEpoch("epoch 1 is over", epoch=1, current_epoch=2)])
async def test_a_command_that_the_new_node_gets_first_is_not_repeated_there(refusal: Exception, tmp_path: Path) -> None:
    async with scripted_node(tmp_path) as node, AsyncClient(state_dir=tmp_path, timeout_s=20) as client:
        node.instance_id = "first"
        await client.acquire(Phase.TRAIN)
        node.instance_id = "second"
        node.refusals.append(refusal)
        with pytest.raises(NodeDown, match="restarted"):
            await client.forward_backward([SAMPLE])
        assert node.num_forward_backward == 0


async def test_a_client_waits_for_a_service_while_the_node_is_locked_and_not_a_moment_longer(tmp_path: Path) -> None:
    async with AsyncClient(state_dir=tmp_path, timeout_s=60, recovery_timeout_s=60) as client:
        with StateLock.take(tmp_path, name=NODE_LOCK):
            async with scripted_node(tmp_path) as node:
                node.instance_id, node.lock_path = "first", str(lock_path(tmp_path, name=NODE_LOCK))
                node.failures.append(PeerUnavailable("being restarted"))
                await client.forward_backward([SAMPLE])
                assert node.num_forward_backward == 1
        started = time.monotonic()
        with pytest.raises(NodeDown, match="has ended"):
            await client.forward_backward([SAMPLE])
        assert time.monotonic() - started < limit_s(10)
