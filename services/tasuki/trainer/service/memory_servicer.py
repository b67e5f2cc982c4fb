"""tasuki.v1.MemoryService of the trainer: stages OFFLOAD and LOAD_TRAINER."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from tasuki.memory.stages import Stage
from tasuki.rpc.stages import named_tags, stage_from_proto
from tasuki.rpc.usage import USAGE_TIMEOUT_S, joined, watch_usage
from tasuki.trainer import stages
from tasuki.trainer.ranks.front import TrainerRanks
from tasuki.trainer.service.state import TrainerState
from tasuki.v1 import memory_pb2
from tasuki.v1.memory_pb2_grpc import MemoryServiceServicer
from tasuki.v1.ranks_pb2 import TrainerRankCommand
from tasuki.v1.trainer_pb2 import WithdrawWeightsRequest
from tasuki.v1.types_pb2 import MemoryTag
from tasuki.wire.errors import GradientsPending, InvalidArgument

TAGS = named_tags(Stage.OFFLOAD)


class MemoryServicer(MemoryServiceServicer):
    """Pauses and resumes the tags in every rank."""

    def __init__(
        self, ranks: TrainerRanks, *, state: TrainerState, staying: frozenset[MemoryTag.ValueType] = frozenset()
    ) -> None:
        """staying: tags that every rank keeps over OFFLOAD."""
        self._ranks, self._state, self._staying = ranks, state, staying

    async def Pause(self, request: memory_pb2.PauseRequest, context: Any) -> memory_pb2.PauseResponse:
        async def pause() -> memory_pb2.PauseResponse:
            async with self._state.turn:
                self._check(request, carries_out=Stage.OFFLOAD)
                if self._state.has_gradients:
                    raise GradientsPending(
                        "gradients are pending, and OFFLOAD would lose them: call OptimStep or DiscardGradients"
                    )
                answers = await self._ranks.call(TrainerRankCommand(pause=request))
                self._state.stage = Stage.OFFLOAD
                self._state.paused_tags.update(tag for tag in request.tags if request.makes_room or tag not in self._staying)
            return memory_pb2.PauseResponse(released_bytes=sum(answer.pause.released_bytes for answer in answers))

        return await self._state.gate.stage(request, pause)

    async def Resume(self, request: memory_pb2.ResumeRequest, context: Any) -> memory_pb2.ResumeResponse:
        async def resume() -> memory_pb2.ResumeResponse:
            async with self._state.turn:
                self._check(request, carries_out=Stage.LOAD_TRAINER)
                answers = await self._ranks.call(TrainerRankCommand(resume=request))
                self._state.paused_tags.difference_update(request.tags)
                # Training changes the weights: what was published is over.
                await self._ranks.call(TrainerRankCommand(withdraw_weights=WithdrawWeightsRequest()))
                self._state.stage, self._state.published_version = Stage.LOAD_TRAINER, None
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

    def _check(self, request: memory_pb2.PauseRequest | memory_pb2.ResumeRequest, *, carries_out: Stage) -> None:
        """Raises StageOrder, or InvalidArgument for a stage that is the other RPC's or a tag that the trainer does not have."""
        stage = stage_from_proto(request.stage)
        stages.raise_unless_next(stage, after=self._state.stage)
        if stage is not carries_out:
            raise InvalidArgument("stage", f"this RPC carries out {carries_out}, not {stage}")
        _check_tags(request.tags)


def _check_tags(tags: Sequence[MemoryTag.ValueType]) -> None:
    for index, tag in enumerate(tags):
        if tag not in TAGS:
            name = MemoryTag.Name(tag) if tag in MemoryTag.values() else str(tag)
            raise InvalidArgument(f"tags[{index}]", f"the trainer has no {name}; it has weights, gradients and optimizer")
