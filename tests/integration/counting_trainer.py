"""A trainer behind a real socket that only counts how often each command ran."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio

from tasuki.rpc.commands import CommandGate
from tasuki.rpc.server import RpcServer
from tasuki.v1 import trainer_pb2, trainer_pb2_grpc, types_pb2
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import InvalidArgument, StageOrder

NAME = "tasuki.v1.TrainerService"


class CountingTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Counts how often each command ran."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.gate = CommandGate()
        self.release = asyncio.Event()
        self.release.set()

    async def OptimStep(self, request, context):
        async def step() -> trainer_pb2.OptimStepResponse:
            await self.release.wait()
            self.num_steps += 1
            return trainer_pb2.OptimStepResponse(version=self.num_steps)

        return await self.gate.once(request, step)

    async def PublishWeights(self, request, context):
        given = request.command.request_id
        if len(given) > 1000:
            raise InvalidArgument("request_id", given, given=given)

        async def publish() -> trainer_pb2.PublishWeightsResponse:
            if request.command.request_id == "out of order":
                raise StageOrder("not now")
            return trainer_pb2.PublishWeightsResponse(published_bytes=self.gate.sequence)

        return await self.gate.stage(request, publish)

    async def GetTrainerState(self, request, context):
        raise ValueError("a secret of the process")

    async def ComputeLogProbs(self, request_iterator, context):
        async for request in request_iterator:
            if not request.samples.samples:
                raise InvalidArgument("samples", "at least one is needed")
            yield trainer_pb2.ComputeLogProbsResponse()


Served = tuple[CountingTrainer, grpc.aio.Channel, RpcServer]


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Served]:
    servicer = CountingTrainer()
    server = RpcServer(service="trainer", target=f"unix:{folder}/trainer.sock")
    server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, servicer, NAME)
    await server.start()
    async with open_channel(server.target) as channel:
        yield servicer, channel, server
    await server.stop(grace_s=0)


def command(request_id: str, *, epoch: int = 0, sequence: int = 0) -> types_pb2.CommandId:
    return types_pb2.CommandId(epoch=epoch, sequence=sequence, request_id=request_id)
