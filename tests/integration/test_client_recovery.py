"""A client whose changeover waits for a service that is being restarted has its whole deadline once it is back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tasuki.client import AsyncClient, Phase
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
from tasuki.wire.errors import DeadlineExceeded


class WaitingNode(
    coordinator_pb2_grpc.CoordinatorServiceServicer,
    trainer_pb2_grpc.TrainerServiceServicer,
    rollout_pb2_grpc.RolloutServiceServicer,
):
    """Comes to a phase once `is_ready`, as a coordinator that waits for rollout does."""

    def __init__(self, state_dir: Path) -> None:
        self.is_ready = asyncio.Event()
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
        return trainer_pb2.GetTrainerStateResponse()

    async def GetRolloutState(self, request: Any, context: Any) -> rollout_pb2.GetRolloutStateResponse:
        return rollout_pb2.GetRolloutStateResponse()

    async def serve(self, name: str) -> RpcServer:
        server = RpcServer(service=name, target=self.targets[name])
        module = {"coordinator": coordinator_pb2_grpc, "trainer": trainer_pb2_grpc, "rollout": rollout_pb2_grpc}[name]
        add = getattr(module, f"add_{name.capitalize()}ServiceServicer_to_server")
        server.add(add, self, f"tasuki.v1.{name.capitalize()}Service")
        await server.start()
        return server


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_call_waits_for_a_service_that_restarts_beyond_its_deadline_and_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    monkeypatch.setattr("tasuki.client.connection.READ_TIMEOUT_S", 0.3)
    socket_folder(tmp_path).mkdir(mode=0o700, parents=True)
    node = WaitingNode(tmp_path)
    servers = [await node.serve(name) for name in ("coordinator", "trainer")]
    if not is_lost:
        servers.append(await node.serve("rollout"))
    try:
        async with AsyncClient(state_dir=tmp_path, timeout_s=0.5, recovery_timeout_s=60) as client:
            acquired = asyncio.create_task(client.acquire(Phase.TRAIN))
            await asyncio.sleep(4.0)
            if is_lost:
                servers.append(await node.serve("rollout"))
                node.is_ready.set()
                assert len(await acquired) == 1
            else:
                with pytest.raises(DeadlineExceeded):
                    await acquired
    finally:
        for server in servers:
            await server.stop(grace_s=0)
