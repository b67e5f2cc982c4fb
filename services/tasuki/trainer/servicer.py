"""tasuki.v1.TrainerService: decodes, has the ranks work, encodes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from tasuki.config.schema import NodeConfig
from tasuki.trainer import batch, requests, stages
from tasuki.trainer.memory_servicer import TAGS
from tasuki.trainer.ranks import Ranks
from tasuki.trainer.state import TrainerState
from tasuki.v1 import ranks_pb2, trainer_pb2, weights_pb2
from tasuki.v1.trainer_pb2 import TrainingSamples
from tasuki.v1.trainer_pb2_grpc import TrainerServiceServicer
from tasuki.v1.types_pb2 import STAGE_LOAD_WEIGHTS, TrainingSample
from tasuki.wire.channel import MAX_CHUNK_BYTES
from tasuki.wire.errors import GradientsNotFinite, GradientsPending, NoGradients


class TrainerServicer(TrainerServiceServicer):
    """One coroutine for each RPC."""

    def __init__(self, ranks: Ranks, *, state: TrainerState, ready: ranks_pb2.RankReady, config: NodeConfig) -> None:
        self._ranks, self._state, self._ready, self._config = ranks, state, ready, config
        self._limits = batch.BatchLimits(
            vocab_size=ready.vocab_size,
            context_length=ready.context_length,
            micro_batch_tokens=config.trainer.micro_batch_tokens,
        )

    async def ForwardBackward(
        self, request_iterator: AsyncIterator[trainer_pb2.ForwardBackwardRequest], context: Any
    ) -> trainer_pb2.ForwardBackwardResponse:
        header, samples = await requests.read_forward_backward(request_iterator)
        return await self._state.gate.once(header, lambda: self._forward_backward(header.loss, samples))

    async def _forward_backward(
        self, loss: trainer_pb2.LossConfig, samples: Sequence[TrainingSample]
    ) -> trainer_pb2.ForwardBackwardResponse:
        started = time.perf_counter()
        async with self._state.training():
            loss = requests.loss_with_defaults(loss)
            batch.check_sequences(samples, limits=self._limits)
            batch.check_loss_fields(samples, kl_coef=loss.kl_coef)
            num_loss_tokens = batch.count_loss_tokens(samples)
            num_gap_tokens = batch.count_gap_tokens(samples, policy_version=self._state.policy_version)
            plan = self._plan(samples)
            commands = [
                ranks_pb2.RankForwardBackward(
                    loss=loss,
                    micro_batches=_pick(samples, micro_batches),
                    num_loss_tokens=num_loss_tokens,
                    num_gap_tokens=num_gap_tokens,
                )
                for micro_batches in plan
            ]
            answers = await self._ranks.call_each(
                [ranks_pb2.TrainerRankCommand(forward_backward=command) for command in commands]
            )
            self._state.has_gradients = True
        parts = [answer.forward_backward for answer in answers]
        return trainer_pb2.ForwardBackwardResponse(
            loss=sum(part.loss for part in parts),
            num_samples=len(samples),
            num_tokens=num_loss_tokens,
            clip_fraction=sum(part.clip_fraction for part in parts),
            ref_kl=sum(part.ref_kl for part in parts),
            max_log_prob_gap=max(part.max_log_prob_gap for part in parts),
            mean_log_prob_gap=sum(part.mean_log_prob_gap for part in parts),
            num_gap_tokens=num_gap_tokens,
            entropy=sum(part.entropy for part in parts),
            num_micro_batches=sum(bool(micro_batch) for micro_batches in plan for micro_batch in micro_batches),
            seconds=time.perf_counter() - started,
        )

    async def OptimStep(self, request: trainer_pb2.OptimStepRequest, context: Any) -> trainer_pb2.OptimStepResponse:
        async def step() -> trainer_pb2.OptimStepResponse:
            async with self._state.training():
                requests.check_learning_rate(request)
                if not self._state.has_gradients:
                    raise NoGradients("there are no gradients: call ForwardBackward first")
                try:
                    answers = await self._ranks.call(ranks_pb2.TrainerRankCommand(optim_step=request))
                except GradientsNotFinite:
                    self._state.has_gradients = False
                    raise
                self._state.has_gradients = False
                self._state.policy_version = answers[0].optim_step.policy_version
                return answers[0].optim_step

        return await self._state.gate.once(request, step)

    async def DiscardGradients(
        self, request: trainer_pb2.DiscardGradientsRequest, context: Any
    ) -> trainer_pb2.DiscardGradientsResponse:
        async def discard() -> trainer_pb2.DiscardGradientsResponse:
            async with self._state.training():
                await self._ranks.call(ranks_pb2.TrainerRankCommand(discard_gradients=request))
                self._state.has_gradients = False
                return trainer_pb2.DiscardGradientsResponse()

        return await self._state.gate.once(request, discard)

    async def ComputeLogProbs(
        self, request_iterator: AsyncIterator[trainer_pb2.ComputeLogProbsRequest], context: Any
    ) -> AsyncIterator[trainer_pb2.ComputeLogProbsResponse]:
        header, samples = await requests.read_compute_log_probs(request_iterator)
        policy, temperature = requests.checked_log_probs_header(header)
        async with self._state.training():
            batch.check_sequences(samples, limits=self._limits)
            plan = self._plan(samples)
            commands = [
                ranks_pb2.RankComputeLogProbs(
                    policy=policy, temperature=temperature, micro_batches=_pick(samples, micro_batches)
                )
                for micro_batches in plan
            ]
            answers = await self._ranks.call_each(
                [ranks_pb2.TrainerRankCommand(compute_log_probs=command) for command in commands]
            )
        scored: dict[int, trainer_pb2.TokenLogProbs] = {}
        for micro_batches, answer in zip(plan, answers, strict=True):
            indices = [index for micro_batch in micro_batches for index in micro_batch]
            scored.update(zip(indices, answer.compute_log_probs.samples, strict=True))
        for chunk in _chunks([scored[index] for index in range(len(samples))]):
            yield trainer_pb2.ComputeLogProbsResponse(samples=chunk)

    async def PublishWeights(
        self, request: trainer_pb2.PublishWeightsRequest, context: Any
    ) -> trainer_pb2.PublishWeightsResponse:
        return await self._state.gate.stage(request, lambda: self._publish(request))

    async def _publish(self, request: trainer_pb2.PublishWeightsRequest) -> trainer_pb2.PublishWeightsResponse:
        started = time.perf_counter()
        state = self._state
        async with state.turn:
            stages.raise_unless_next(STAGE_LOAD_WEIGHTS, after=state.stage)
            if state.has_gradients:
                raise GradientsPending("gradients are pending: call OptimStep or DiscardGradients before weights are published")
            answers = await self._ranks.call(ranks_pb2.TrainerRankCommand(publish_weights=request))
            state.stage, state.published_version = STAGE_LOAD_WEIGHTS, state.policy_version
            published = [answer.publish_weights for answer in answers]
            return trainer_pb2.PublishWeightsResponse(
                weights=weights_pb2.PublishedWeights(
                    policy_version=state.policy_version, handles=[part.handle for part in published], boot_id=state.boot_id
                ),
                published_bytes=sum(part.published_bytes for part in published),
                seconds=time.perf_counter() - started,
            )

    async def WithdrawWeights(
        self, request: trainer_pb2.WithdrawWeightsRequest, context: Any
    ) -> trainer_pb2.WithdrawWeightsResponse:
        async def withdraw() -> trainer_pb2.WithdrawWeightsResponse:
            async with self._state.turn:
                stage = stages.stage_after_withdrawal(self._state.stage)
                await self._ranks.call(ranks_pb2.TrainerRankCommand(withdraw_weights=request))
                self._state.stage, self._state.published_version = stage, None
                return trainer_pb2.WithdrawWeightsResponse()

        # The coordinator's undo has a place in its sequence; anyone else's withdrawal has none.
        run = self._state.gate.stage if request.command.sequence else self._state.gate.once
        return await run(request, withdraw)

    async def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: Any
    ) -> trainer_pb2.SaveCheckpointResponse:
        async def save() -> trainer_pb2.SaveCheckpointResponse:
            requests.check_path(request.path)
            async with self._state.training():
                answers = await self._ranks.call(ranks_pb2.TrainerRankCommand(save_checkpoint=request))
                return answers[0].save_checkpoint

        return await self._state.gate.once(request, save)

    async def LoadCheckpoint(
        self, request: trainer_pb2.LoadCheckpointRequest, context: Any
    ) -> trainer_pb2.LoadCheckpointResponse:
        async def load() -> trainer_pb2.LoadCheckpointResponse:
            requests.check_path(request.path)
            async with self._state.training():
                answers = await self._ranks.call(ranks_pb2.TrainerRankCommand(load_checkpoint=request))
                self._state.has_gradients = False
                self._state.policy_version = answers[0].load_checkpoint.policy_version
                return answers[0].load_checkpoint

        return await self._state.gate.once(request, load)

    async def ExportModel(self, request: trainer_pb2.ExportModelRequest, context: Any) -> trainer_pb2.ExportModelResponse:
        async def export() -> trainer_pb2.ExportModelResponse:
            requests.check_path(request.path)
            async with self._state.training():
                answers = await self._ranks.call(ranks_pb2.TrainerRankCommand(export_model=request))
                return answers[0].export_model

        return await self._state.gate.once(request, export)

    async def GetTrainerState(
        self, request: trainer_pb2.GetTrainerStateRequest, context: Any
    ) -> trainer_pb2.GetTrainerStateResponse:
        state = self._state
        return trainer_pb2.GetTrainerStateResponse(
            boot_id=state.boot_id,
            epoch=state.gate.epoch,
            sequence=state.gate.sequence,
            stage=state.stage,
            resident_tags=[tag for tag in TAGS if tag not in state.paused_tags],
            policy_version=state.policy_version,
            published_version=state.published_version,
            has_gradients=state.has_gradients,
            num_ranks=self._ranks.num_ranks,
            num_parameters=self._ready.num_parameters,
            vocab_size=self._ready.vocab_size,
            context_length=self._ready.context_length,
            model_path=str(self._config.model.path),
        )

    def _plan(self, samples: Sequence[TrainingSample]) -> batch.MicroBatchPlan:
        lengths = [batch.sample_length(sample) for sample in samples]
        return batch.plan_micro_batches(lengths, num_ranks=self._ranks.num_ranks, max_tokens=self._limits.micro_batch_tokens)


def _pick(samples: Sequence[TrainingSample], micro_batches: Sequence[Sequence[int]]) -> list[TrainingSamples]:
    return [TrainingSamples(samples=[samples[index] for index in indices]) for indices in micro_batches]


def _chunks(scored: Sequence[trainer_pb2.TokenLogProbs]) -> Iterator[list[trainer_pb2.TokenLogProbs]]:
    """Runs of samples that fit into a message; a single one always does, since so did the request."""
    chunk: list[trainer_pb2.TokenLogProbs] = []
    chunk_bytes = 0
    for sample in scored:
        sample_bytes = sample.ByteSize()
        if chunk and chunk_bytes + sample_bytes > MAX_CHUNK_BYTES:
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append(sample)
        chunk_bytes += sample_bytes
    yield chunk
