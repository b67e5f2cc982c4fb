"""tasuki.v1.MemoryService of the trainer: stages OFFLOAD and LOAD_TRAINER."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from tasuki.rpc.memory import USAGE_TIMEOUT_S, decode_move, joined, watch_usage
from tasuki.trainer.ranks.front import TrainerRanks
from tasuki.trainer.service.state import TrainerState, raise_unless_next
from tasuki.v1 import memory_pb2
from tasuki.v1.memory_pb2_grpc import MemoryServiceServicer
from tasuki.v1.ranks_pb2 import TrainerRankCommand
from tasuki.v1.trainer_pb2 import WithdrawWeightsRequest
from tasuki.wire.errors import GradientsPending
from tasuki.wire.stages import MemoryTag, Service


class MemoryServicer(MemoryServiceServicer):
    """Pauses and resumes tags on every rank."""

    def __init__(self, ranks: TrainerRanks, *, state: TrainerState, staying: frozenset[MemoryTag] = frozenset()) -> None:
        """staying: tags that every rank keeps during OFFLOAD."""
        self._ranks, self._state, self._staying = ranks, state, staying

    async def Pause(self, request: memory_pb2.PauseRequest, context: Any) -> memory_pb2.PauseResponse:
        stage, tags = decode_move(request, Service.TRAINER)

        async def pause() -> memory_pb2.PauseResponse:
            async with self._state.turn:
                raise_unless_next(stage, after=self._state.stage)
                if self._state.has_gradients:
                    raise GradientsPending(
                        "gradients are pending, and OFFLOAD would lose them: call OptimStep or DiscardGradients"
                    )
                answers = await self._ranks.call(TrainerRankCommand(pause=request))
                self._state.stage = stage
                self._state.paused_tags.update(tag for tag in tags if request.makes_room or tag not in self._staying)
            return memory_pb2.PauseResponse(released_bytes=sum(answer.pause.released_bytes for answer in answers))

        return await self._state.gate.stage(request, pause)

    async def Resume(self, request: memory_pb2.ResumeRequest, context: Any) -> memory_pb2.ResumeResponse:
        stage, tags = decode_move(request, Service.TRAINER)

        async def resume() -> memory_pb2.ResumeResponse:
            async with self._state.turn:
                raise_unless_next(stage, after=self._state.stage)
                answers = await self._ranks.call(TrainerRankCommand(resume=request))
                self._state.paused_tags.difference_update(tags)
                # Training changes the weights, so the publication is no longer valid.
                await self._ranks.call(TrainerRankCommand(withdraw_weights=WithdrawWeightsRequest()))
                self._state.stage, self._state.published_version = stage, None
            return memory_pb2.ResumeResponse(mapped_bytes=sum(answer.resume.mapped_bytes for answer in answers))

        return await self._state.gate.stage(request, resume)

    async def GetUsage(self, request: memory_pb2.GetUsageRequest, context: Any) -> memory_pb2.GetUsageResponse:
        return await self._usage(request)

    async def WatchUsage(
        self, request: memory_pb2.WatchUsageRequest, context: Any
    ) -> AsyncIterator[memory_pb2.WatchUsageResponse]:
        async for response in watch_usage(request, lambda: self._usage(memory_pb2.GetUsageRequest())):
            yield response

    async def _usage(self, request: memory_pb2.GetUsageRequest) -> memory_pb2.GetUsageResponse:
        """Raises DeadlineExceeded while the ranks are in the middle of something long."""
        answers = await self._ranks.call(TrainerRankCommand(get_usage=request), timeout_s=USAGE_TIMEOUT_S)
        return joined([answer.get_usage for answer in answers])
