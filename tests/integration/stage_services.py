"""Trainer and rollout as gRPC servers that only keep the stage rules, for tests of a coordinator without a model."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tasuki.config.paths import node_targets, socket_dir
from tasuki.config.schema import NodeConfig
from tasuki.memory.device_usage import device_usage
from tasuki.rpc.commands import CommandGate
from tasuki.rpc.logs import open_service_tracer
from tasuki.rpc.memory import usage_response
from tasuki.rpc.port import port_of
from tasuki.rpc.server import RpcServer
from tasuki.v1 import memory_pb2, memory_pb2_grpc, rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from tasuki.v1.types_pb2 import (
    STAGE_DRAIN,
    STAGE_LOAD_TRAINER,
    STAGE_LOAD_WEIGHTS,
    STAGE_OFFLOAD,
    STAGE_PAUSE_KV,
    STAGE_PAUSE_WEIGHTS,
    STAGE_RESUME_KV,
    STAGE_RESUME_WEIGHTS,
    STAGE_SYNC,
    STAGE_UNSPECIFIED,
    CommandId,
    Stage,
)
from tasuki.v1.weights_pb2 import PublishedWeights
from tasuki.wire.errors import DeadlineExceeded, StageOrder, TasukiError

# For each stage, the stages after which its service accepts it, forwards or as an undo.
_AFTER = {
    STAGE_LOAD_WEIGHTS: {STAGE_UNSPECIFIED, STAGE_LOAD_TRAINER},
    STAGE_OFFLOAD: {STAGE_LOAD_WEIGHTS},
    STAGE_LOAD_TRAINER: {STAGE_OFFLOAD},
    STAGE_RESUME_WEIGHTS: {STAGE_UNSPECIFIED, STAGE_PAUSE_WEIGHTS},
    STAGE_SYNC: {STAGE_RESUME_WEIGHTS},
    STAGE_RESUME_KV: {STAGE_SYNC, STAGE_DRAIN, STAGE_PAUSE_KV},
    STAGE_DRAIN: {STAGE_RESUME_KV},
    STAGE_PAUSE_KV: {STAGE_DRAIN, STAGE_RESUME_KV},
    STAGE_PAUSE_WEIGHTS: {STAGE_PAUSE_KV, STAGE_RESUME_WEIGHTS, STAGE_SYNC},
}


@dataclass
class StageService:
    """State of one service.

    fail: errors by stage. hold: stages that wait for their event; held: set while one waits. commands: all accepted ones.
    """

    version: int = 0
    received: int | None = None
    served: int | None = None
    stage: Stage.ValueType = STAGE_UNSPECIFIED
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    gate: CommandGate = field(default_factory=CommandGate)
    fail: dict[int, TasukiError] = field(default_factory=dict)
    hold: dict[int, asyncio.Event] = field(default_factory=dict)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    commands: list[CommandId] = field(default_factory=list)
    refuses_usage: bool = False

    async def run(self, request: Any, stage: Stage.ValueType, answer: Any, work: Callable[[], Any] = lambda: None) -> Any:
        async def act() -> Any:
            if self.stage not in _AFTER[stage]:
                raise StageOrder(f"{Stage.Name(stage)} after {Stage.Name(self.stage)}")
            if stage in self.hold:
                self.held.set()
                await self.hold[stage].wait()
            if stage in self.fail:
                raise self.fail[stage]
            done = work()
            self.commands.append(request.command)
            self.stage = stage
            return answer if done is None else done

        return await self.gate.stage(request, act)


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    def __init__(self, service: StageService) -> None:
        self.service = service

    async def PublishWeights(self, request: Any, context: Any) -> Any:
        weights = PublishedWeights(policy_version=self.service.version, boot_id=self.service.boot_id)
        answer = trainer_pb2.PublishWeightsResponse(weights=weights, published_bytes=1000)
        return await self.service.run(request, STAGE_LOAD_WEIGHTS, answer)

    async def WithdrawWeights(self, request: Any, context: Any) -> Any:
        async def act() -> Any:
            self.service.stage = STAGE_LOAD_TRAINER
            return trainer_pb2.WithdrawWeightsResponse()

        return await self.service.gate.stage(request, act)

    async def GetTrainerState(self, request: Any, context: Any) -> Any:
        self.service.gate.look(request.epoch)
        return trainer_pb2.GetTrainerStateResponse(
            boot_id=self.service.boot_id, stage=self.service.stage, is_in_stage=self.service.gate.is_in_stage
        )


class Rollout(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self, service: StageService) -> None:
        self.service = service

    async def ReceiveWeights(self, request: Any, context: Any) -> Any:
        version = request.weights.policy_version
        answer = rollout_pb2.ReceiveWeightsResponse(policy_version=version, copied_bytes=1000)
        answer = await self.service.run(request, STAGE_SYNC, answer)
        self.service.received = version
        return answer

    async def Drain(self, request: Any, context: Any) -> Any:
        answer = await self.service.run(request, STAGE_DRAIN, rollout_pb2.DrainResponse())
        self.service.served = None
        return answer

    async def GetRolloutState(self, request: Any, context: Any) -> Any:
        service = self.service
        service.gate.look(request.epoch)
        return rollout_pb2.GetRolloutStateResponse(
            boot_id=service.boot_id, stage=service.stage, policy_version=service.served, is_in_stage=service.gate.is_in_stage
        )


class Memory(memory_pb2_grpc.MemoryServiceServicer):
    def __init__(self, service: StageService) -> None:
        self.service = service

    async def Pause(self, request: Any, context: Any) -> Any:
        return await self.service.run(request, request.stage, memory_pb2.PauseResponse(released_bytes=500))

    async def Resume(self, request: Any, context: Any) -> Any:
        answer = await self.service.run(request, request.stage, memory_pb2.ResumeResponse(mapped_bytes=500))
        if request.stage == STAGE_RESUME_KV:
            self.service.served = self.service.received
        return answer

    async def GetUsage(self, request: Any, context: Any) -> Any:
        if self.service.refuses_usage:
            raise DeadlineExceeded("the ranks are busy")
        return usage_response([], device_usage("cpu", 0))


@asynccontextmanager
async def serving(config: NodeConfig) -> AsyncIterator[tuple[StageService, StageService]]:
    """Serves both services on the node's sockets; yields (trainer, rollout)."""
    trainer, rollout = StageService(), StageService()
    socket_dir(config.state_dir)
    targets = node_targets(config)
    servers, tracers = [], []
    for name, service, servicer, add in (
        ("trainer", trainer, Trainer(trainer), trainer_pb2_grpc.add_TrainerServiceServicer_to_server),
        ("rollout", rollout, Rollout(rollout), rollout_pb2_grpc.add_RolloutServiceServicer_to_server),
    ):
        tracer = open_service_tracer(config, service=name)
        server = RpcServer(service=name, target=targets[name], port=port_of(config, name), tracer=tracer)
        server.add(add, servicer, f"tasuki.v1.{name.title()}Service")
        server.add(memory_pb2_grpc.add_MemoryServiceServicer_to_server, Memory(service), "tasuki.v1.MemoryService")
        await server.start()
        servers.append(server)
        tracers.append(tracer)
    try:
        yield trainer, rollout
    finally:
        for server in servers:
            await server.stop(grace_s=0.0)
        for tracer in tracers:
            await asyncio.to_thread(tracer.close)
