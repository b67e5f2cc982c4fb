"""A client whose changeover waits for a restarting service has its whole deadline once the service is back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from tasuki.client import AsyncClient, Phase
from tasuki.client.connection import Connection
from tasuki.rpc.server import RpcServer
from tasuki.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    types_pb2,
)
from tasuki.wire.address import socket_folder, unix_target
from tasuki.wire.errors import DeadlineExceeded, StaleEpoch, TasukiError, to_status


class WaitingNode(
    coordinator_pb2_grpc.CoordinatorServiceServicer,
    trainer_pb2_grpc.TrainerServiceServicer,
    rollout_pb2_grpc.RolloutServiceServicer,
):
    """A node that reaches a phase once `is_ready` is set, like a coordinator that waits for rollout."""

    def __init__(self, state_dir: Path) -> None:
        socket_folder(state_dir).mkdir(mode=0o700, parents=True)
        self.is_ready = asyncio.Event()
        self.num_asked = self.num_late = 0
        self._servers: dict[str, RpcServer] = {}
        self.targets = {name: unix_target(state_dir, service=name) for name in ("coordinator", "trainer", "rollout")}

    def _state(self) -> coordinator_pb2.NodeState:
        targets = {f"{name}_target": self.targets[name] for name in ("trainer", "rollout")}
        return coordinator_pb2.NodeState(epoch=1, phase=types_pb2.PHASE_TRAIN, **targets)

    async def GetState(self, request: Any, context: Any) -> coordinator_pb2.GetStateResponse:
        return coordinator_pb2.GetStateResponse(state=self._state())

    async def Acquire(self, request, context):
        await self.is_ready.wait()
        event = coordinator_pb2.StageEvent(status=coordinator_pb2.STAGE_STATUS_HELD)
        yield coordinator_pb2.AcquireResponse(event=event, state=self._state())

    async def GetTrainerState(self, request: Any, context: Any) -> trainer_pb2.GetTrainerStateResponse:
        self.num_asked += 1
        if self.num_asked <= self.num_late:
            await asyncio.sleep(5)
        return trainer_pb2.GetTrainerStateResponse()

    async def GetRolloutState(self, request: Any, context: Any) -> rollout_pb2.GetRolloutStateResponse:
        return rollout_pb2.GetRolloutStateResponse()

    async def serve(self, name: str) -> None:
        server = RpcServer(service=name, target=self.targets[name])
        module = {"coordinator": coordinator_pb2_grpc, "trainer": trainer_pb2_grpc, "rollout": rollout_pb2_grpc}[name]
        add = getattr(module, f"add_{name.capitalize()}ServiceServicer_to_server")
        server.add(add, self, f"tasuki.v1.{name.capitalize()}Service")
        await server.start()
        self._servers[name] = server

    async def stop(self, *names: str) -> None:
        """Stops the named servers; all, if none is named."""
        for name in names or tuple(self._servers):
            await self._servers.pop(name).stop(grace_s=0)


Node = TypeVar("Node", bound=WaitingNode)


@asynccontextmanager
async def serving(node: Node, *names: str) -> AsyncIterator[Node]:
    """Serves under these names while the block runs, including servers that the block starts."""
    try:
        for name in names:
            await node.serve(name)
        yield node
    finally:
        await node.stop()


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_call_waits_for_a_service_that_restarts_beyond_its_deadline_and_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    monkeypatch.setattr("tasuki.client.connection.READ_TIMEOUT_S", 0.3)
    names = ("coordinator", "trainer") if is_lost else ("coordinator", "trainer", "rollout")
    client = AsyncClient(state_dir=tmp_path, timeout_s=0.5, recovery_timeout_s=60)
    async with serving(WaitingNode(tmp_path), *names) as node, client:
        acquired = asyncio.create_task(client.acquire(Phase.TRAIN))
        await asyncio.sleep(4.0)
        if is_lost:
            await node.serve("rollout")
            node.is_ready.set()
            assert len(await acquired) == 1
        else:
            with pytest.raises(DeadlineExceeded):
                await acquired


@pytest.mark.parametrize("cause", ["cancelled", "broken off", "late"])
async def test_a_call_that_grpc_gives_up_is_given_again_and_at_its_deadline_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    monkeypatch.setattr("tasuki.client.connection.READ_TIMEOUT_S", 0.1)
    connection = Connection(unix_target(tmp_path, service="coordinator"), recovery_timeout_s=0.5)
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

    async with serving(WaitingNode(tmp_path), "coordinator"), AsyncExitStack() as stack:
        stack.push_async_callback(connection.close)
        if cause == "late":
            with pytest.raises(DeadlineExceeded):
                await connection.command(give, timeout_s=0.1)
        else:
            assert await connection.command(give, timeout_s=60) == "answer"
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

    async with serving(WaitingNode(tmp_path), "coordinator") as node:
        connection = Connection(node.targets["coordinator"], recovery_timeout_s=60)
        assert await connection.command(give, timeout_s=60) == "done"
        await connection.close()
    assert len(given) == 3 and len(set(given)) == 1
