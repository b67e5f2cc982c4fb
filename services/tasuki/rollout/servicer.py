"""tasuki.v1.RolloutService: decode, call, encode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from functools import partial

import grpc
import grpc.aio

from tasuki.rollout.generate import Sample
from tasuki.rollout.metrics import GenerationMetrics
from tasuki.rollout.rollout import Rollout
from tasuki.rpc.calls import remaining_s
from tasuki.rpc.commands import CommandGate
from tasuki.rpc.memory import USAGE_TIMEOUT_S, decode_move, watch_usage
from tasuki.v1 import memory_pb2, memory_pb2_grpc, rollout_pb2, rollout_pb2_grpc, types_pb2, weights_pb2
from tasuki.wire.stages import Service


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


_REASONS = {
    "stop": types_pb2.FINISH_REASON_STOP,
    "length": types_pb2.FINISH_REASON_LENGTH,
    "abort": types_pb2.FINISH_REASON_CUT,
}
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
                self._metrics.ended([sample.completion for sample in samples])
                for bundle in _bundles(samples):
                    yield rollout_pb2.GenerateResponse(samples=map(_encode_sample, bundle))

    async def ReceiveWeights(
        self, request: rollout_pb2.ReceiveWeightsRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.ReceiveWeightsResponse:
        timeout_s = remaining_s(context)

        async def receive() -> rollout_pb2.ReceiveWeightsResponse:
            report = await self._rollout.receive(request.weights, timeout_s=timeout_s)
            return rollout_pb2.ReceiveWeightsResponse(
                policy_version=report.policy_version,
                copied_bytes=report.copied_bytes,
                fallback_names=report.fallback_names,
                timings=[types_pb2.Timing(name=name, seconds=seconds) for name, seconds in report.timings.items()],
                sums=weights_pb2.WeightSums(
                    policy_version=report.policy_version, layout_digest=report.layout_digest, checksums=report.checksums
                ),
            )

        return await self._gate.stage(request, receive)

    async def Drain(self, request: rollout_pb2.DrainRequest, context: grpc.aio.ServicerContext) -> rollout_pb2.DrainResponse:
        drain = partial(self._rollout.drain, grace_s=request.grace_ms / 1000, timeout_s=remaining_s(context))
        drained = await self._gate.stage(request, drain)
        return rollout_pb2.DrainResponse(num_finished=drained.num_finished, num_cut=drained.num_cut)

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


def _bundles(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Groups as many samples as fit into one message."""
    bundle: list[Sample] = []
    num_tokens = 0
    for sample in samples:
        bundle.append(sample)
        num_tokens += len(sample.completion.token_ids) + _TOKENS_FOR_FIELDS
        if num_tokens > _MAX_BUNDLE_TOKENS:
            yield bundle
            bundle, num_tokens = [], 0
    if bundle:
        yield bundle


def _encode_sample(sample: Sample) -> types_pb2.Sample:
    return types_pb2.Sample(
        prompt_index=sample.prompt_index,
        sample_index=sample.sample_index,
        token_ids=sample.completion.token_ids,
        rollout_log_probs=sample.completion.log_probs,
        finish_reason=_REASONS[sample.completion.reason],
        policy_version=sample.policy_version,
        temperature=sample.temperature,
        has_exact_log_probs=sample.has_exact_log_probs,
    )
