"""The simulated trainer and rollout as gRPC servers, for tests of a coordinator without a model."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tasuki.config.paths import node_targets, socket_dir
from tasuki.config.schema import NodeConfig
from tasuki.memory.device_usage import device_usage
from tasuki.rpc.logs import open_service_tracer
from tasuki.rpc.memory import usage_response
from tasuki.rpc.port import port_of
from tasuki.rpc.server import RpcServer
from tasuki.v1 import memory_pb2_grpc, rollout_pb2_grpc, trainer_pb2_grpc
from tasuki.v1.types_pb2 import CommandId
from tasuki.wire.errors import DeadlineExceeded, TasukiError
from tasuki.wire.stages import Stage
from tests.unit.simulated_services import Disk, SimulatedRollout, SimulatedService, SimulatedTrainer, stage_of

_STAGES = {"PublishWeightsRequest": Stage.LOAD_WEIGHTS, "ReceiveWeightsRequest": Stage.SYNC, "DrainRequest": Stage.DRAIN}


class StageService(SimulatedService):
    """fail: errors by stage. hold: stages that wait for their event; reached: set while one waits. commands: all accepted ones."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.weather.seconds = 0.0
        self.fail: dict[Stage, TasukiError] = {}
        self.hold: dict[Stage, asyncio.Event] = {}
        self.reached = asyncio.Event()
        self.commands: list[CommandId] = []
        self.refuses_usage = False

    def _counted(self, request: Any, act: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
        counted = super()._counted(request, act)

        async def run() -> Any:
            name = type(request).__name__
            stage = stage_of(request) if hasattr(request, "stage") else _STAGES.get(name)
            if stage in self.hold:
                self.reached.set()
                await self.hold[stage].wait()
            if stage in self.fail:
                raise self.fail[stage]
            answer = await counted()
            self.commands.append(request.command)
            return answer

        return run

    async def GetUsage(self, request: Any) -> Any:
        if self.refuses_usage:
            raise DeadlineExceeded("the ranks are busy")
        return usage_response([], device_usage("cpu", 0))


class StageTrainer(StageService, SimulatedTrainer):
    pass


class StageRollout(StageService, SimulatedRollout):
    pass


def servicer(base: type, service: StageService) -> Any:
    """A servicer whose methods are those of the service."""
    names = [name for name in vars(base) if hasattr(type(service), name) and name[0].isupper()]

    def method(name: str) -> Callable[..., Awaitable[Any]]:
        async def call(self: Any, request: Any, context: Any) -> Any:
            return await getattr(service, name)(request)

        return call

    return type(base.__name__, (base,), {name: method(name) for name in names})()


@asynccontextmanager
async def serving(config: NodeConfig) -> AsyncIterator[tuple[StageTrainer, StageRollout]]:
    """Serves both services on the node's sockets; yields (trainer, rollout)."""
    trainer = StageTrainer(uuid.uuid4().hex, Disk())
    rollout = StageRollout(uuid.uuid4().hex, lambda: trainer, lambda _: None)
    socket_dir(config.state_dir)
    targets = node_targets(config)
    servers, tracers = [], []
    for name, service, module in (("trainer", trainer, trainer_pb2_grpc), ("rollout", rollout, rollout_pb2_grpc)):
        tracer = open_service_tracer(config, service=name)
        server = RpcServer(service=name, target=targets[name], port=port_of(config, name), tracer=tracer)
        for kind, generated in ((name.title(), module), ("Memory", memory_pb2_grpc)):
            add = getattr(generated, f"add_{kind}ServiceServicer_to_server")
            made = servicer(getattr(generated, f"{kind}ServiceServicer"), service)
            server.add(add, made, f"tasuki.v1.{kind}Service")
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
