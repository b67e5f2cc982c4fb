"""tasuki.v1.MemoryService of the rollout service: decode, call, encode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable

import grpc
import grpc.aio

from tasuki.memory.stages import Service
from tasuki.rollout.rollout import Rollout
from tasuki.rpc.calls import remaining_s
from tasuki.rpc.commands import CommandGate
from tasuki.rpc.stages import decode_move
from tasuki.rpc.usage import USAGE_TIMEOUT_S, watch_usage
from tasuki.v1 import memory_pb2, memory_pb2_grpc


class RolloutMemoryServicer(memory_pb2_grpc.MemoryServiceServicer):
    """gRPC interface to the engine's memory, moved by stages."""

    def __init__(self, rollout: Rollout, gate: CommandGate) -> None:
        self._rollout, self._gate = rollout, gate

    async def Pause(self, request: memory_pb2.PauseRequest, context: grpc.aio.ServicerContext) -> memory_pb2.PauseResponse:
        stage, tags = decode_move(request, Service.ROLLOUT)
        timeout_s = remaining_s(context)

        async def pause() -> memory_pb2.PauseResponse:
            return memory_pb2.PauseResponse(released_bytes=await self._rollout.pause(stage, tags, timeout_s=timeout_s))

        return await self._gate.stage(request, pause)

    async def Resume(self, request: memory_pb2.ResumeRequest, context: grpc.aio.ServicerContext) -> memory_pb2.ResumeResponse:
        stage, tags = decode_move(request, Service.ROLLOUT)
        timeout_s = remaining_s(context)

        async def resume() -> memory_pb2.ResumeResponse:
            return memory_pb2.ResumeResponse(mapped_bytes=await self._rollout.resume(stage, tags, timeout_s=timeout_s))

        return await self._gate.stage(request, resume)

    async def GetUsage(
        self, request: memory_pb2.GetUsageRequest, context: grpc.aio.ServicerContext
    ) -> memory_pb2.GetUsageResponse:
        # Of a shorter deadline a part, so that the caller hears why it was not met.
        return await self._rollout.ranks.usage(request, timeout_s=min(USAGE_TIMEOUT_S, 0.9 * remaining_s(context)))

    async def WatchUsage(
        self, request: memory_pb2.WatchUsageRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[memory_pb2.WatchUsageResponse]:
        def usage() -> Awaitable[memory_pb2.GetUsageResponse]:
            return self._rollout.ranks.usage(memory_pb2.GetUsageRequest(), timeout_s=USAGE_TIMEOUT_S)

        async for response in watch_usage(request, usage):
            yield response
