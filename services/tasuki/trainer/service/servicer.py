"""tasuki.v1.TrainerService: decodes, calls the ranks, encodes."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from tasuki.algorithms.loss_types import LossConfig
from tasuki.config.paths import training_save_path
from tasuki.config.schema import NodeConfig
from tasuki.models.routes import Routes
from tasuki.rpc.commands import Commanded, chunks, digest
from tasuki.rpc.memory import UsageServicer, decode_move, joined
from tasuki.trainer.data.samples import Samples
from tasuki.trainer.durable.restore import recipe
from tasuki.trainer.durable.training_log import TrainingLog
from tasuki.trainer.ranks import TrainerRanks
from tasuki.trainer.service import requests
from tasuki.trainer.service.saving import Saving
from tasuki.trainer.service.state import TrainerMetrics, TrainerState, raise_unless_next, stage_after_withdrawal
from tasuki.trainer.service.training import Training
from tasuki.trainer.wire import ROLES, Role
from tasuki.v1 import memory_pb2, ranks_pb2, trainer_pb2, weights_pb2
from tasuki.v1.ranks_pb2 import TrainerRankCommand
from tasuki.v1.trainer_pb2 import WithdrawWeightsRequest
from tasuki.v1.trainer_pb2_grpc import TrainerServiceServicer
from tasuki.v1.types_pb2 import ROLE_CRITIC, STAGE_UNSPECIFIED, TrainingSample
from tasuki.v1.types_pb2 import Role as RoleMessage
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.routes import in_parts
from tasuki.wire.stages import RULES, MemoryTag, Service, Stage

_log = logging.getLogger("tasuki.trainer")
_Answer = TypeVar("_Answer", bound=Message)
_OnDisk = trainer_pb2.SaveCheckpointRequest | trainer_pb2.LoadCheckpointRequest | trainer_pb2.ExportModelRequest


class TrainerServicer(TrainerServiceServicer):
    """gRPC interface of the trainer: one coroutine for each RPC."""

    def __init__(
        self,
        training: Training,
        *,
        log: TrainingLog,
        ready: ranks_pb2.RankReady,
        config: NodeConfig,
        metrics: TrainerMetrics,
    ) -> None:
        self._training, self._log, self._metrics = training, log, metrics
        self._ranks, self._state = training.ranks, training.state
        self._ready, self._config = ready, config
        record_path = training_save_path(config.state_dir)
        self._saving = Saving(training.ranks, log, state=training.state, record_path=record_path)

    async def BeginRun(self, request: trainer_pb2.BeginRunRequest, context: Any) -> trainer_pb2.BeginRunResponse:
        if request.validate_only:
            async with self._validating(request) as is_repeat:
                if not is_repeat:
                    self._state.check_no_gradients("BeginRun")
                return trainer_pb2.BeginRunResponse(policy_version=self._state.policy_version)

        return await self._logged(request, lambda: self._training.begin_run(request), begin_run=request)

    async def ForwardBackward(
        self, request_iterator: AsyncIterator[trainer_pb2.ForwardBackwardRequest], context: Any
    ) -> trainer_pb2.ForwardBackwardResponse:
        header, samples = await requests.read_forward_backward(request_iterator)
        if header.validate_only:
            async with self._validating(header) as is_repeat:
                if is_repeat:
                    return trainer_pb2.ForwardBackwardResponse(num_samples=len(samples))
                decoded = (await asyncio.to_thread(self._decode, header, samples))[2]
                num_tokens = int(decoded.columns["loss_mask"].sum())
                return trainer_pb2.ForwardBackwardResponse(num_samples=len(samples), num_tokens=num_tokens)
        content = digest(header, samples)

        async def forward_backward() -> trainer_pb2.ForwardBackwardResponse:
            async with self._state.training():
                # In a thread: images may take seconds.
                role, config, decoded = await asyncio.to_thread(self._decode, header, samples)
                logged = ranks_pb2.LoggedForwardBackward(
                    role=header.role,
                    loss=header.loss,
                    samples=samples,
                    is_share=header.is_share,
                    is_own_denominator=header.is_own_denominator,
                    step_samples=header.step_samples if header.HasField("step_samples") else None,
                    call_samples=header.call_samples,
                    step_places=header.step_places,
                )
                async with self._log.command(self._record(header, content=content, forward_backward=logged)):
                    with self._metrics.using("forward_backward"):
                        answer = await self._training.forward_backward(
                            role, header, config, decoded, log_probs_of=header.log_probs_of
                        )
                self._metrics.learned(role, decoded, answer, policy_version=self._state.policy_version)
                if not header.is_share:
                    answer.metric_parts.clear()
                return answer

        return await self._state.gate.once(header, forward_backward, content=content)

    def _decode(
        self, header: trainer_pb2.ForwardBackwardHeader, samples: Sequence[TrainingSample]
    ) -> tuple[Role, LossConfig, Samples]:
        """Decodes the call. Raises every error for which it would be refused."""
        requests.check_linearized(header, policy_version=self._state.policy_version, lora=self._config.trainer.lora)
        role, config, decoded = self._training.decode_forward_backward(header, samples)
        requests.check_log_probs_of(header.log_probs_of, role=role, samples=decoded)
        return role, config, decoded

    @asynccontextmanager
    async def _validating(self, request: Commanded) -> AsyncIterator[bool]:
        """A turn in which a command is validated. Yields whether the command has already begun, so that its own effects are ignored.

        Raises every error that would prevent the command from running.
        """
        is_repeat = self._state.gate.has_begun(request)
        async with self._state.training():
            self._log.check_not_behind()
            yield is_repeat

    async def OptimStep(self, request: trainer_pb2.OptimStepRequest, context: Any) -> trainer_pb2.OptimStepResponse:
        if request.validate_only:
            async with self._validating(request) as is_repeat:
                state = self._training.check_optim_step(request, is_repeat=is_repeat)
                return trainer_pb2.OptimStepResponse(version=state.version)

        async def step() -> trainer_pb2.OptimStepResponse:
            with self._metrics.using("optim_step"):
                answer = await self._training.optim_step(request)
            self._metrics.stepped(ROLES[request.role], answer)
            return answer

        return await self._logged(request, step, optim_step=request)

    async def DiscardGradients(
        self, request: trainer_pb2.DiscardGradientsRequest, context: Any
    ) -> trainer_pb2.DiscardGradientsResponse:
        return await self._logged(request, lambda: self._training.discard_gradients(request), discard_gradients=request)

    async def ComputeLogProbs(
        self, request_iterator: AsyncIterator[trainer_pb2.ComputeLogProbsRequest], context: Any
    ) -> AsyncIterator[trainer_pb2.ComputeLogProbsResponse]:
        header, samples = await requests.read_compute_log_probs(request_iterator)
        requests.decode_role(header.role, allowed=(Role.POLICY, Role.REFERENCE), field="header.role")
        rows, routes = await self._score(header.role, samples, is_old_policy=header.is_old_policy)
        scored = [trainer_pb2.TokenLogProbs(log_probs=row) for row in rows]
        for one, routes_TR in zip(scored, routes, strict=False):  # empty if none are returned
            one.routed_experts, one.route_bytes = routes_TR.tobytes(), routes_TR.nbytes // len(routes_TR)
        for chunk in chunks(list(in_parts(scored))):
            yield trainer_pb2.ComputeLogProbsResponse(samples=chunk)

    async def ComputeValues(
        self, request_iterator: AsyncIterator[trainer_pb2.ComputeValuesRequest], context: Any
    ) -> AsyncIterator[trainer_pb2.ComputeValuesResponse]:
        samples = await requests.read_compute_values(request_iterator)
        rows, _ = await self._score(ROLE_CRITIC, samples)
        for chunk in chunks([trainer_pb2.TokenValues(values=row) for row in rows]):
            yield trainer_pb2.ComputeValuesResponse(samples=chunk)

    async def _score(
        self, role: RoleMessage.ValueType, samples: Sequence[TrainingSample], *, is_old_policy: bool = False
    ) -> tuple[list[NDArray[np.float32]], list[Routes]]:
        async with self._state.training():
            scored = await asyncio.to_thread(self._training.decode_scored, role, samples, is_old_policy=is_old_policy)
            with self._metrics.using("score"):
                return await self._training.score(*scored)

    async def PublishWeights(
        self, request: trainer_pb2.PublishWeightsRequest, context: Any
    ) -> trainer_pb2.PublishWeightsResponse:
        return await self._state.gate.stage(request, lambda: self._publish(request))

    async def _publish(self, request: trainer_pb2.PublishWeightsRequest) -> trainer_pb2.PublishWeightsResponse:
        started = time.perf_counter()
        state = self._state
        async with state.turn:
            raise_unless_next(Stage.LOAD_WEIGHTS, after=state.stage)
            state.check_no_gradients("publishing")
            answers = await self._ranks.call(ranks_pb2.TrainerRankCommand(publish_weights=request))
            state.stage, state.published_version = Stage.LOAD_WEIGHTS, state.policy_version
            published = [answer.publish_weights for answer in answers]
            return trainer_pb2.PublishWeightsResponse(
                weights=weights_pb2.PublishedWeights(
                    policy_version=state.policy_version,
                    handles=[part.handle for part in published],
                    boot_id=state.boot_id,
                    loaded=state.loaded,
                ),
                published_bytes=sum(part.published_bytes for part in published),
                seconds=time.perf_counter() - started,
            )

    async def WithdrawWeights(
        self, request: trainer_pb2.WithdrawWeightsRequest, context: Any
    ) -> trainer_pb2.WithdrawWeightsResponse:
        async def withdraw() -> trainer_pb2.WithdrawWeightsResponse:
            async with self._state.turn:
                stage = stage_after_withdrawal(self._state.stage)
                await self._ranks.call(ranks_pb2.TrainerRankCommand(withdraw_weights=request))
                self._state.stage, self._state.published_version = stage, None
                return trainer_pb2.WithdrawWeightsResponse()

        # A coordinator's undo has a place in its sequence; other callers' withdrawals do not.
        run = self._state.gate.stage if request.command.sequence else self._state.gate.once
        return await run(request, withdraw)

    async def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: Any
    ) -> trainer_pb2.SaveCheckpointResponse:
        return await self._on_disk(request, lambda: self._saving.save(request, self._record(request)))

    async def LoadCheckpoint(
        self, request: trainer_pb2.LoadCheckpointRequest, context: Any
    ) -> trainer_pb2.LoadCheckpointResponse:
        if request.validate_only:
            async with self._validating(request):
                requests.check_path(request.path)
                self._state.check_no_gradients("LoadCheckpoint")
                answers = await self._ranks.call(ranks_pb2.TrainerRankCommand(load_checkpoint=request))
                return answers[0].load_checkpoint

        async def load() -> trainer_pb2.LoadCheckpointResponse:
            if request.HasField("as_version"):
                raise InvalidArgument("as_version", "is for the trainer's own log; leave it out")
            if not self._log.is_behind:  # else only a load or a restart helps
                self._state.check_no_gradients("LoadCheckpoint")
            before, loaded = self._state.policy_version, await self._training.load_checkpoint(request)
            logged = trainer_pb2.LoadCheckpointRequest(path=request.path, as_version=loaded.policy_version)
            await self._log.loaded(self._record(request, checkpoint=logged))
            _log.info("event=loaded path=%a policy_version=%d before=%d", request.path, loaded.policy_version, before)
            return loaded

        return await self._on_disk(request, load)

    async def ExportModel(self, request: trainer_pb2.ExportModelRequest, context: Any) -> trainer_pb2.ExportModelResponse:
        async def export() -> trainer_pb2.ExportModelResponse:
            answers = await self._ranks.call(ranks_pb2.TrainerRankCommand(export_model=request))
            return answers[0].export_model

        return await self._on_disk(request, export)

    async def GetTrainerState(
        self, request: trainer_pb2.GetTrainerStateRequest, context: Any
    ) -> trainer_pb2.GetTrainerStateResponse:
        state = self._state
        state.gate.look(request.epoch)
        return trainer_pb2.GetTrainerStateResponse(
            boot_id=state.boot_id,
            epoch=state.gate.epoch,
            sequence=state.gate.sequence,
            stage=state.stage.number if state.stage else STAGE_UNSPECIFIED,
            resident_tags=[tag.number for tag in RULES[Stage.OFFLOAD].pauses if tag not in state.paused_tags],
            policy_version=state.policy_version,
            published_version=state.published_version,
            has_gradients=state.has_gradients,
            num_ranks=self._ranks.num_ranks,
            num_parameters=state.roles[Role.POLICY].num_parameters,
            vocab_size=self._ready.vocab_size,
            context_length=self._ready.context_length,
            model_path=str(self._config.model.path),
            is_in_stage=state.gate.is_in_stage,
            roles=state.roles.values(),
            micro_batch_tokens=self._training.micro_batch_tokens,
            nodes_rate=self._ready.nodes_rate if self._ready.HasField("nodes_rate") else None,
            nodes_transport=self._ready.nodes_transport,
        )

    async def _logged(self, request: Commanded, run: Callable[[], Awaitable[_Answer]], **command: Any) -> _Answer:
        """Runs a command once, in a turn, and logs it."""

        async def once() -> _Answer:
            async with self._state.training(), self._log.command(self._record(request, **command)):
                return await run()

        return await self._state.gate.once(request, once)

    async def _on_disk(self, request: _OnDisk, run: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Runs a command of a path once, in a turn."""

        async def once() -> _Answer:
            requests.check_path(request.path)
            async with self._state.training():
                with self._metrics.using("checkpoint"):
                    return await run()

        return await self._state.gate.once(request, once)

    def _record(self, request: Commanded, *, content: bytes | None = None, **command: Any) -> ranks_pb2.TrainingRecord:
        """A command as a log record. content: digest of a stream, of which `request` is the header."""
        return ranks_pb2.TrainingRecord(
            request_id=request.command.request_id,
            digest=digest(request) if content is None else content,
            recipe=recipe(self._config),
            **command,
        )


class MemoryServicer(UsageServicer):
    """Pauses and resumes tags on every rank."""

    def __init__(self, ranks: TrainerRanks, *, state: TrainerState, staying: frozenset[MemoryTag] = frozenset()) -> None:
        """staying: tags that every rank keeps during OFFLOAD."""
        super().__init__(self._read_usage)
        self._ranks, self._state, self._staying = ranks, state, staying

    async def Pause(self, request: memory_pb2.PauseRequest, context: Any) -> memory_pb2.PauseResponse:
        stage, tags = decode_move(request, Service.TRAINER)

        async def pause() -> memory_pb2.PauseResponse:
            async with self._state.turn:
                raise_unless_next(stage, after=self._state.stage)
                self._state.check_no_gradients("OFFLOAD")
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

    async def _read_usage(self, request: memory_pb2.GetUsageRequest, timeout_s: float) -> memory_pb2.GetUsageResponse:
        answers = await self._ranks.call(TrainerRankCommand(get_usage=request), timeout_s=timeout_s)
        return joined([answer.get_usage for answer in answers])
