"""tasuki.v1.RolloutService and MemoryService: decode, call, encode."""

from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from functools import partial

import grpc
import grpc.aio

from tasuki.rollout.metrics import GenerationMetrics
from tasuki.rollout.rollout import Rollout
from tasuki.rpc.commands import CommandGate, remaining_s
from tasuki.rpc.memory import USAGE_TIMEOUT_S, decode_move, watch_usage
from tasuki.v1 import memory_pb2, memory_pb2_grpc, rollout_pb2, rollout_pb2_grpc, types_pb2
from tasuki.v1.memory_pb2 import PauseRequest, PauseResponse, ResumeRequest, ResumeResponse
from tasuki.wire.routes import in_parts
from tasuki.wire.stages import Service

# A token and its log-prob take at most 9 bytes, so that even with the longest last sample a message stays below 4 MiB.
_MAX_BUNDLE_TOKENS = 131_072
_TOKENS_FOR_FIELDS = 8


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """gRPC interface of the rollout service."""

    def __init__(self, rollout: Rollout, gate: CommandGate, *, metrics: GenerationMetrics) -> None:
        self._rollout, self._gate, self._metrics = rollout, gate, metrics

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        with self._metrics.generating():
            async for samples in self._rollout.generate(request):
                self._metrics.ended(samples)
                for bundle in _bundles(samples):
                    yield rollout_pb2.GenerateResponse(samples=bundle)

    async def ReceiveWeights(
        self, request: rollout_pb2.ReceiveWeightsRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.ReceiveWeightsResponse:
        receive = partial(self._rollout.receive, request.weights, timeout_s=remaining_s(context))
        return await self._gate.stage(request, receive)

    async def Drain(self, request: rollout_pb2.DrainRequest, context: grpc.aio.ServicerContext) -> rollout_pb2.DrainResponse:
        drain = partial(self._rollout.drain, grace_s=request.grace_ms / 1000, timeout_s=remaining_s(context))
        return await self._gate.stage(request, drain)

    async def GetRolloutState(
        self, request: rollout_pb2.GetRolloutStateRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.GetRolloutStateResponse:
        rollout, engine = self._rollout, self._rollout.engine
        self._gate.look(request.epoch)
        return rollout_pb2.GetRolloutStateResponse(
            boot_id=rollout.boot_id,
            epoch=self._gate.epoch,
            sequence=self._gate.sequence,
            stage=rollout.stage.number if rollout.stage else types_pb2.STAGE_UNSPECIFIED,
            resident_tags=[tag.number for tag in rollout.ranks.resident_tags],
            policy_version=rollout.policy_version,
            received_version=rollout.received_version,
            is_poisoned=rollout.poison_reason is not None,
            poison_reason=rollout.poison_reason or "",
            num_running=rollout.num_running,
            tp_size=engine.tp_size,
            dp_size=engine.num_replicas,
            context_length=engine.model.context_length,
            vocab_size=engine.model.vocab_size,
            model_path=engine.model.path,
            is_in_stage=self._gate.is_in_stage,
            stop_token_ids=engine.model.stop_token_ids,
        )


class RolloutMemoryServicer(memory_pb2_grpc.MemoryServiceServicer):
    """gRPC interface to the engine's memory, moved by stages."""

    def __init__(self, rollout: Rollout, gate: CommandGate) -> None:
        self._rollout, self._gate = rollout, gate

    async def Pause(self, request: PauseRequest, context: grpc.aio.ServicerContext) -> PauseResponse:
        stage, tags = decode_move(request, Service.ROLLOUT)
        pause = partial(self._rollout.pause, stage, tags, timeout_s=remaining_s(context))
        return await self._gate.stage(request, pause)

    async def Resume(self, request: ResumeRequest, context: grpc.aio.ServicerContext) -> ResumeResponse:
        stage, tags = decode_move(request, Service.ROLLOUT)
        resume = partial(self._rollout.resume, stage, tags, timeout_s=remaining_s(context))
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


def _bundles(samples: Sequence[types_pb2.Sample]) -> Iterator[list[types_pb2.Sample]]:
    """Groups as many samples as fit into one message."""
    bundle: list[types_pb2.Sample] = []
    num_tokens = 0
    for sample in in_parts(samples):
        bundle.append(sample)
        num_tokens += len(sample.token_ids) + _TOKENS_FOR_FIELDS + len(sample.routed_experts) // _TOKENS_FOR_FIELDS
        if num_tokens > _MAX_BUNDLE_TOKENS:
            yield bundle
            bundle, num_tokens = [], 0
    if bundle:
        yield bundle
