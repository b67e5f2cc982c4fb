"""tasuki.v1.RolloutService and tasuki.v1.MemoryService: decode, call, encode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

import grpc
import grpc.aio

from tasuki.memory.allocator import MemoryTag
from tasuki.rollout.generate import GenerationRequest, Sample
from tasuki.rollout.rollout import Rollout
from tasuki.rollout.stages import Stage
from tasuki.rpc.commands import CommandGate
from tasuki.v1 import memory_pb2, memory_pb2_grpc, rollout_pb2, rollout_pb2_grpc, types_pb2
from tasuki.wire.errors import InvalidArgument

_STAGES = {
    types_pb2.STAGE_UNSPECIFIED: Stage.START,
    types_pb2.STAGE_RESUME_WEIGHTS: Stage.RESUME_WEIGHTS,
    types_pb2.STAGE_SYNC: Stage.SYNC,
    types_pb2.STAGE_RESUME_KV: Stage.RESUME_KV,
    types_pb2.STAGE_DRAIN: Stage.DRAIN,
    types_pb2.STAGE_PAUSE_KV: Stage.PAUSE_KV,
    types_pb2.STAGE_PAUSE_WEIGHTS: Stage.PAUSE_WEIGHTS,
}
_STAGE_VALUES = {stage: value for value, stage in _STAGES.items()}
_TAGS = {
    types_pb2.MEMORY_TAG_WEIGHTS: MemoryTag.WEIGHTS,
    types_pb2.MEMORY_TAG_KV_CACHE: MemoryTag.KV_CACHE,
}
_TAG_VALUES = {tag: value for value, tag in _TAGS.items()}
_REASONS = {
    "stop": types_pb2.FINISH_REASON_STOP,
    "length": types_pb2.FINISH_REASON_LENGTH,
    "abort": types_pb2.FINISH_REASON_CUT,
}
# rpc/ refuses a mutating call without a deadline.
_NO_DEADLINE_S = 600.0
# A token and its log-prob take at most 9 bytes, so that with the longest last sample a message stays below 4 MiB.
_MAX_BUNDLE_TOKENS = 131_072
_TOKENS_FOR_FIELDS = 8


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """The rollout service on the wire."""

    def __init__(self, rollout: Rollout, gate: CommandGate) -> None:
        self._rollout, self._gate = rollout, gate

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        sampling = {field.name: value for field, value in request.sampling_params.ListFields()}
        if "stop_token_ids" in sampling:
            sampling["stop_token_ids"] = list(sampling["stop_token_ids"])
        generation = GenerationRequest([list(prompt.token_ids) for prompt in request.prompts], request.num_samples, sampling)
        async for samples in self._rollout.generate(generation):
            for bundle in _bundles(samples):
                yield rollout_pb2.GenerateResponse(samples=map(_encode_sample, bundle))

    async def ReceiveWeights(
        self, request: rollout_pb2.ReceiveWeightsRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.ReceiveWeightsResponse:
        timeout_s = _remaining_s(context)

        async def receive() -> rollout_pb2.ReceiveWeightsResponse:
            report = await self._rollout.receive(request.weights, timeout_s=timeout_s)
            return rollout_pb2.ReceiveWeightsResponse(
                policy_version=report.policy_version,
                copied_bytes=report.copied_bytes,
                fallback_names=report.fallback_names,
                timings=[types_pb2.Timing(name=name, seconds=seconds) for name, seconds in report.timings.items()],
            )

        return await self._gate.stage(request, receive)

    async def Drain(self, request: rollout_pb2.DrainRequest, context: grpc.aio.ServicerContext) -> rollout_pb2.DrainResponse:
        timeout_s = _remaining_s(context)

        async def drain() -> rollout_pb2.DrainResponse:
            drained = await self._rollout.drain(grace_s=request.grace_ms / 1000, timeout_s=timeout_s)
            return rollout_pb2.DrainResponse(num_finished=drained.num_finished, num_cut=drained.num_cut)

        return await self._gate.stage(request, drain)

    async def GetRolloutState(
        self, request: rollout_pb2.GetRolloutStateRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.GetRolloutStateResponse:
        rollout, engine = self._rollout, self._rollout.engine
        usage = rollout.allocators[0].usage()
        return rollout_pb2.GetRolloutStateResponse(
            boot_id=rollout.boot_id,
            epoch=self._gate.epoch,
            sequence=self._gate.sequence,
            stage=_STAGE_VALUES[rollout.stage],
            resident_tags=[_TAG_VALUES[tag.tag] for tag in usage if not tag.is_paused],
            policy_version=rollout.policy_version,
            received_version=rollout.received_version,
            is_poisoned=rollout.poison_reason is not None,
            poison_reason=rollout.poison_reason or "",
            num_running=rollout.num_running,
            tp_size=len(engine.reports),
            context_length=engine.model.context_length,
            vocab_size=engine.model.vocab_size,
            model_path=engine.model.path,
        )


class RolloutMemoryServicer(memory_pb2_grpc.MemoryServiceServicer):
    """The engine's memory on the wire: its stages move tags."""

    def __init__(self, rollout: Rollout, gate: CommandGate) -> None:
        self._rollout, self._gate = rollout, gate

    async def Pause(self, request: memory_pb2.PauseRequest, context: grpc.aio.ServicerContext) -> memory_pb2.PauseResponse:
        async def pause() -> memory_pb2.PauseResponse:
            stage = _decode_stage(request.stage, (Stage.PAUSE_KV, Stage.PAUSE_WEIGHTS))
            released = await self._rollout.pause(stage, _decode_tags(request.tags))
            return memory_pb2.PauseResponse(released_bytes=released, frees_memory=self._frees_memory())

        return await self._gate.stage(request, pause)

    async def Resume(self, request: memory_pb2.ResumeRequest, context: grpc.aio.ServicerContext) -> memory_pb2.ResumeResponse:
        async def resume() -> memory_pb2.ResumeResponse:
            stage = _decode_stage(request.stage, (Stage.RESUME_WEIGHTS, Stage.RESUME_KV))
            mapped = await self._rollout.resume(stage, _decode_tags(request.tags))
            return memory_pb2.ResumeResponse(mapped_bytes=mapped, frees_memory=self._frees_memory())

        return await self._gate.stage(request, resume)

    async def GetUsage(
        self, request: memory_pb2.GetUsageRequest, context: grpc.aio.ServicerContext
    ) -> memory_pb2.GetUsageResponse:
        tags = [
            types_pb2.TagUsage(
                tag=_TAG_VALUES[usage.tag],
                device=usage.device,
                rank=rank,
                mapped_bytes=usage.mapped_bytes,
                total_bytes=usage.total_bytes,
                is_paused=usage.is_paused,
            )
            for rank, allocator in enumerate(self._rollout.allocators)
            for usage in allocator.usage()
        ]
        return memory_pb2.GetUsageResponse(tags=tags, frees_memory=self._frees_memory())

    def _frees_memory(self) -> bool:
        return all(allocator.frees_memory for allocator in self._rollout.allocators)


def _remaining_s(context: grpc.aio.ServicerContext) -> float:
    remaining = context.time_remaining()
    return _NO_DEADLINE_S if remaining is None else remaining


def _bundles(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Together as many as fit into one message."""
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
    )


def _decode_stage(value: types_pb2.Stage.ValueType, allowed: tuple[Stage, ...]) -> Stage:
    stage = _STAGES.get(value)
    if stage is None or stage not in allowed:
        raise InvalidArgument("stage", f"this call takes {' or '.join(allowed)}, not {stage if stage is not None else value}")
    return stage


def _decode_tags(values: Sequence[types_pb2.MemoryTag.ValueType]) -> list[MemoryTag]:
    for index, value in enumerate(values):
        if value not in _TAGS:
            raise InvalidArgument(f"tags[{index}]", f"rollout has {', '.join(_TAG_VALUES)}, not tag {value}")
    return [_TAGS[value] for value in values]
