"""tasuki.v1.MemoryService of the rollout service: decode, call, encode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from tasuki.rollout.decode import decode_stage, decode_tags, remaining_s
from tasuki.rollout.rollout import Rollout
from tasuki.rollout.stages import Stage
from tasuki.rpc.commands import CommandGate
from tasuki.v1 import memory_pb2, memory_pb2_grpc
from tasuki.wire.errors import DeadlineExceeded, InvalidArgument

# Ranks answer between two batches; below the time that the command line waits.
_USAGE_TIMEOUT_S = 4.0
_INTERVAL_MS = range(20, 60_001)
_DEFAULT_INTERVAL_MS = 1000


class RolloutMemoryServicer(memory_pb2_grpc.MemoryServiceServicer):
    """The engine's memory on the wire: its stages move tags."""

    def __init__(self, rollout: Rollout, gate: CommandGate) -> None:
        self._rollout, self._gate = rollout, gate

    async def Pause(self, request: memory_pb2.PauseRequest, context: grpc.aio.ServicerContext) -> memory_pb2.PauseResponse:
        timeout_s = remaining_s(context)

        async def pause() -> memory_pb2.PauseResponse:
            stage = decode_stage(request.stage, (Stage.PAUSE_KV, Stage.PAUSE_WEIGHTS))
            released = await self._rollout.pause(stage, decode_tags(request.tags), timeout_s=timeout_s)
            return memory_pb2.PauseResponse(released_bytes=released, frees_memory=True)

        return await self._gate.stage(request, pause)

    async def Resume(self, request: memory_pb2.ResumeRequest, context: grpc.aio.ServicerContext) -> memory_pb2.ResumeResponse:
        timeout_s = remaining_s(context)

        async def resume() -> memory_pb2.ResumeResponse:
            stage = decode_stage(request.stage, (Stage.RESUME_WEIGHTS, Stage.RESUME_KV))
            mapped = await self._rollout.resume(stage, decode_tags(request.tags), timeout_s=timeout_s)
            return memory_pb2.ResumeResponse(mapped_bytes=mapped, frees_memory=True)

        return await self._gate.stage(request, resume)

    async def GetUsage(
        self, request: memory_pb2.GetUsageRequest, context: grpc.aio.ServicerContext
    ) -> memory_pb2.GetUsageResponse:
        # Of a shorter deadline a part, so that the caller hears why it was not met.
        return await self._rollout.memory.usage(timeout_s=min(_USAGE_TIMEOUT_S, 0.9 * remaining_s(context)))

    async def WatchUsage(
        self, request: memory_pb2.WatchUsageRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[memory_pb2.WatchUsageResponse]:
        interval_ms = request.interval_ms if request.HasField("interval_ms") else _DEFAULT_INTERVAL_MS
        if interval_ms not in _INTERVAL_MS:
            raise InvalidArgument("interval_ms", f"{interval_ms} ms; from {_INTERVAL_MS.start} to {_INTERVAL_MS.stop - 1}")
        clock = asyncio.get_running_loop()
        while True:
            started = clock.time()
            try:
                response = memory_pb2.WatchUsageResponse(usage=await self._rollout.memory.usage(timeout_s=_USAGE_TIMEOUT_S))
            except DeadlineExceeded:
                continue  # the ranks are in the middle of something long; the next answer comes when they are done
            response.time.GetCurrentTime()
            yield response
            await asyncio.sleep(max(0.0, started + interval_ms / 1000 - clock.time()))
