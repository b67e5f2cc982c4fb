"""The asyncio client. It holds the implementation; sync_client.py offers the same verbs without await."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import grpc.aio
import numpy as np
from numpy.typing import NDArray

from tasuki.algorithms.loss_types import LossConfig
from tasuki.client import encode, generation
from tasuki.client.connection import READ_TIMEOUT_S, Connection, check_seconds, resolve_target
from tasuki.client.custom_loss import LINEAR, CustomLoss, linearized
from tasuki.client.encode import TokenIds
from tasuki.client.messages import message_of
from tasuki.client.types import (
    Changeover,
    ForwardBackwardResult,
    NodeState,
    OptimStepResult,
    Phase,
    Role,
    RolloutState,
    Sample,
    SamplingParams,
    SaveResult,
    StageEvent,
    TrainerState,
    TrainingSample,
    Watched,
)
from tasuki.v1 import coordinator_pb2, rollout_pb2, trainer_pb2, types_pb2
from tasuki.wire.credentials import Credentials, read_headers
from tasuki.wire.errors import Asleep, Draining, InternalError, InvalidArgument, PeerUnavailable, from_rpc_error
from tasuki.wire.routes import Whole
from tasuki.wire.tracing import check_tracing_installed, open_tracer

if TYPE_CHECKING:
    from tasuki.v1.trainer_pb2_grpc import TrainerServiceAsyncStub

_Answer = TypeVar("_Answer")
_Request: TypeAlias = (
    trainer_pb2.BeginRunRequest
    | trainer_pb2.OptimStepRequest
    | trainer_pb2.DiscardGradientsRequest
    | trainer_pb2.SaveCheckpointRequest
    | trainer_pb2.LoadCheckpointRequest
    | trainer_pb2.ExportModelRequest
)
_MAX_LOSSES = 4


class AsyncClient:
    """A client of one node. `generate` acquires phase ROLLOUT; the training verbs acquire TRAIN.

    Every verb may raise DeadlineExceeded after timeout_s, PeerUnavailable if a service does not come back and NodeDown if the node
    has ended; at a TCP port also Unauthenticated or PermissionDenied. Verbs that change the phase raise as `acquire`.

    The caller orders dependent calls: optim_step uses the gradients of every forward_backward that finished before it.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        state_dir: Path | str | None = None,
        credentials: Credentials | None = None,
        timeout_s: float = 600.0,
        recovery_timeout_s: float = 600.0,
        otlp_endpoint: str | None = None,
        otlp_headers_file: Path | str | None = None,
    ) -> None:
        """target: the coordinator's address, e.g. "unix:/run/tasuki/coordinator.sock" or "node-a:50050"; or the node's state folder.

        credentials: for the node's TCP ports; unix sockets need none.

        timeout_s: deadline of each verb that generates, trains, saves or changes the phase. recovery_timeout_s: how long a verb waits
        for a service to restart.

        otlp_endpoint: OTLP/HTTP endpoint for OpenTelemetry spans, such as "http://127.0.0.1:4318"; needs the extra `otel`.

        otlp_headers_file: headers for it, one `name: value` per line, in a file that only you can read.
        """
        check_seconds("timeout_s", timeout_s)
        check_seconds("recovery_timeout_s", recovery_timeout_s, is_zero_allowed=True)
        if not isinstance(credentials, Credentials | None):  # callers may have no types
            raise InvalidArgument("credentials", f"is of type {type(credentials).__name__}; give Credentials(ca=...)")
        check_tracing_installed(otlp_endpoint)
        self._otlp_headers = None if otlp_headers_file is None else read_headers("otlp_headers_file", Path(otlp_headers_file))
        self._otlp_endpoint = otlp_endpoint
        self._recovery_timeout_s = recovery_timeout_s
        self._target = resolve_target(target, state_dir)
        self._timeout_s, self._credentials = timeout_s, credentials
        self._opened: Connection | None = None

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channels. Work already started on the node continues."""
        if self._opened is not None:
            await self._opened.close()
            self._opened = None

    async def generate(
        self,
        prompts: Sequence[TokenIds],
        sampling_params: SamplingParams | None = None,
        *,
        num_samples: int = 1,
        call_number: int | None = None,
        session_key: str | None = None,
        images: Sequence[Sequence[bytes]] = (),
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Sample]:
        """Generates `num_samples` completions of each prompt, ordered by prompt, then by sample_index.

        All of them are regenerated if rollout restarts. Raises InvalidArgument for a prompt or parameter that rollout refuses.

        call_number: calls of equal content and number get the same samples of equal weights where samples are seeded, whichever client
        makes them. By default every call gets others.

        session_key: keeps calls of the same key, such as a conversation's turns, on the replica that has their prefix in its KV cache.

        images: of each prompt, the PNG, JPEG or WebP files of its placeholders, of which it has one for each image.

        on_progress: called with the numbers of samples and of their tokens so far, from 0; from 0 again if rollout restarts.
        """
        requests = generation.requests(
            prompts,
            sampling_params or SamplingParams(),
            num_samples=num_samples,
            call_number=call_number,
            session_key=session_key,
            images=images,
        )
        tell = on_progress or (lambda num_samples, num_tokens: None)
        for number in range(_MAX_LOSSES + 1):
            samples, num_tokens = list[Sample](), 0
            tell(0, 0)
            try:
                async for sample in self._samples(requests, len(prompts) * num_samples):
                    samples.append(sample)
                    num_tokens += len(sample.token_ids)
                    tell(len(samples), num_tokens)
                return sorted(samples, key=lambda sample: (sample.prompt_index, sample.sample_index))
            except PeerUnavailable as error:
                if "peer" in error.metadata or number == _MAX_LOSSES:
                    raise
                # The coordinator waits for rollout to restart.
                await self.acquire(Phase.ROLLOUT)
        raise AssertionError("the last attempt raises")

    async def generate_stream(
        self,
        prompts: Sequence[TokenIds],
        sampling_params: SamplingParams | None = None,
        *,
        num_samples: int = 1,
    ) -> AsyncGenerator[Sample, None]:
        """Yields the samples of `generate` as they complete. Leaving the loop early cancels the rest. Raises as `generate`."""
        requests = generation.requests(prompts, sampling_params or SamplingParams(), num_samples=num_samples)
        async with aclosing(self._samples(requests, len(prompts) * num_samples)) as samples:
            async for sample in samples:
                yield sample

    async def generate_until(
        self,
        parts: Sequence[generation.Part],
        add: Callable[[Sample], bool],
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Sample]:
        """Generates until `add`, called with each sample, first returns True; then begins phase TRAIN, which cuts the others at once.

        Returns the samples in order of arrival, cut ones with FinishReason.CUT; prompt_index is the part's position. Samples that had
        not begun may be missing, and more where rollout restarts or another client takes the GPUs. on_progress: as for `generate`.
        """
        samples, num_tokens, has_begun = list[Sample](), 0, False
        await self._connection.hold(Phase.ROLLOUT)
        rollout = await self._connection.rollout()
        try:
            async for sample in generation.stream(rollout, generation.requests_of(parts), timeout_s=self._timeout_s):
                samples.append(sample)
                num_tokens += len(sample.token_ids)
                if on_progress is not None:
                    on_progress(len(samples), num_tokens)
                if add(sample) and not has_begun:
                    has_begun = True
                    await self._connection.begin_acquire(Phase.TRAIN)
        except PeerUnavailable as error:
            if "peer" in error.metadata:
                raise
        if not has_begun:
            self._connection.phase = None  # the next call asks for it: something may have ended this one
        return samples

    async def generate_if_served(self, part: generation.Part) -> Sample | None:
        """Draws one sample without acquiring a phase. A drain cuts it at once, or returns None for one that had not begun.

        None also while the node is not in phase ROLLOUT. Raises PeerUnavailable if rollout is lost.
        """
        return await generation.draw(await self._connection.rollout(), part, timeout_s=self._timeout_s)

    async def _samples(self, requests: Sequence[generation.Request], num_samples: int) -> AsyncGenerator[Sample, None]:
        """num_samples: total over all requests."""
        num_received = 0
        for is_last_try in (False, True):
            await self._connection.hold(Phase.ROLLOUT)
            try:
                async for sample in generation.stream(await self._connection.rollout(), requests, timeout_s=self._timeout_s):
                    num_received += 1
                    yield sample
                break
            except (Asleep, Draining):
                # Another client took the GPUs. Samples already yielded must not be repeated.
                if is_last_try or num_received:
                    raise
                self._connection.phase = None
        if num_received != num_samples:
            raise InternalError(f"rollout ended the stream after {num_received} of {num_samples} samples")

    async def begin_run(self, *, keep_optimizer: bool = False) -> int:
        """Restarts the learning-rate schedules of all roles at step 0 and resets optimizer state unless told to keep it.

        Returns the policy version. Raises GradientsPending if accumulated gradients await a step.
        """
        request = message_of(trainer_pb2.BeginRunRequest, {"keep_optimizer": keep_optimizer})
        return (await self._train(request, lambda trainer: trainer.BeginRun)).policy_version

    async def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        loss: LossConfig | None = None,
        *,
        role: Role = Role.POLICY,
        step_samples: Sequence[TrainingSample] | None = None,
        log_probs_of: Sequence[int] = (),
        request_id: str | None = None,
    ) -> ForwardBackwardResult:
        """Accumulates the gradients of the loss over all samples for `role`. The default is PPO's loss, averaged over counted tokens.

        step_samples: all samples of the optimizer step, when `samples` are a part of them: the calls then add up to one call over all,
        its loss and gradients included: the `loss` of a part is its share of the step's. A sample sent twice is refused, and so is
        `optim_step` before all have come.
        log_probs_of: positions of samples whose log-probs, as computed by the loss, are returned with the result.
        request_id: of the call, also for other mutating verbs. Repeated under it, by any client, an equal call takes effect once.
        Raises InvalidArgument naming the invalid field of a sample or the loss, and MessageTooLarge for a sample that is too long.
        """
        chunks = encode.training_chunks(samples)
        # Made before the call: grpc.aio waits for the deadline if the iterator of messages raises.
        loss = encode.loss_of_part(LossConfig() if loss is None else loss, samples, step_samples=step_samples)
        header = encode.forward_backward_header(role, loss, log_probs_of=log_probs_of, num_samples=len(samples))
        if step_samples is not None:
            header.step_samples = len(step_samples)
            header.step_places.extend(encode.places_in(step_samples, samples))
        return await self._forward_backward(header, chunks, request_id=request_id)

    async def _forward_backward(
        self,
        header: trainer_pb2.ForwardBackwardHeader,
        chunks: Sequence[trainer_pb2.TrainingSamples],
        *,
        request_id: str | None = None,
    ) -> ForwardBackwardResult:
        async def give(command: types_pb2.CommandId, timeout_s: float) -> trainer_pb2.ForwardBackwardResponse:
            def messages() -> Iterator[trainer_pb2.ForwardBackwardRequest]:
                header.command.CopyFrom(command)
                yield trainer_pb2.ForwardBackwardRequest(header=header)
                for chunk in chunks:
                    yield trainer_pb2.ForwardBackwardRequest(samples=chunk)

            return await (await self._connection.trainer()).ForwardBackward(messages(), timeout=timeout_s)

        return encode.forward_backward_result(await self._connection.train(give, request_id=request_id))

    async def forward_backward_custom(self, samples: Sequence[TrainingSample], loss: CustomLoss) -> ForwardBackwardResult:
        """Accumulates the policy's gradients of a loss in Python: `loss(samples, log_probs)`, called once with all samples.

        log_probs: [T] for each sample, tensors if torch is installed, else arrays. The loss returns a tensor of one number, or itself the
        loss and its gradient with respect to each of log_probs. Costs a forward pass more than `forward_backward`; several calls of a
        step add up, undivided. Raises InvalidArgument naming sample and token of a gradient that is not finite or that the loss mask
        excludes, or trainer.lora.dropout; VersionOrder if another client has taken a step since the loss got its log-probs.
        """
        version = (await self.trainer_state()).policy_version
        value, weighted = linearized(samples, await self.compute_log_probs(samples), loss)
        header = encode.forward_backward_header(Role.POLICY, LINEAR, log_probs_of=(), num_samples=len(weighted))
        header.linearized_at = version
        done = await self._forward_backward(header, encode.training_chunks(weighted))
        return replace(done, loss=value, metrics=done.metrics | {"loss": value})

    async def optim_step(
        self,
        *,
        role: Role = Role.POLICY,
        learning_rate: float | None = None,
        schedule_step: int | None = None,
        schedule_steps: int | None = None,
        request_id: str | None = None,
    ) -> OptimStepResult:
        """Clips the gradients of `role` and takes one AdamW step.

        learning_rate: overrides the schedule for this step. schedule_step: position in the schedule; by default, steps since begin_run.
        schedule_steps: length of a linear or cosine schedule. Raises NoGradients without a preceding forward_backward,
        GradientsNotFinite unless the node skips such steps, and InvalidArgument for a number out of range or missing.
        """
        settings = {"learning_rate": learning_rate, "schedule_step": schedule_step, "schedule_steps": schedule_steps}
        request = message_of(trainer_pb2.OptimStepRequest, {"role": encode.enum_to_proto(Role, role), **settings})
        return await self._train(request, lambda trainer: trainer.OptimStep, request_id=request_id)

    async def discard_gradients(self, *, role: Role = Role.POLICY) -> None:
        """Clears accumulated gradients without a step."""
        request = trainer_pb2.DiscardGradientsRequest(role=encode.enum_to_proto(Role, role))
        await self._train(request, lambda trainer: trainer.DiscardGradients)

    async def compute_log_probs(
        self, samples: Sequence[TrainingSample], *, role: Role = Role.POLICY
    ) -> list[NDArray[np.float32]]:
        """Computes the log-probability of each completion token, comparable with `rollout_log_probs`: [T] for each sample, in order.

        Natural logarithms. Raises InvalidArgument naming the invalid field of a sample.
        """
        header = trainer_pb2.ComputeLogProbsHeader(role=encode.enum_to_proto(Role, role))
        return [np.array(one.log_probs, dtype=np.float32) for one in await self._scored(samples, header)]

    async def with_old_log_probs(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Computes `old_log_probs` of the policy, before the first of several steps on the samples; for OldPolicy.GIVEN.

        With trainer.router_replay = "old_policy" also the `routed_experts` of this pass, which the steps replay. Raises InvalidArgument.
        """
        header = trainer_pb2.ComputeLogProbsHeader(role=types_pb2.ROLE_POLICY, is_old_policy=True)
        scored = await self._scored(samples, header)
        return [encode.with_old_log_probs(sample, one) for sample, one in zip(samples, scored, strict=True)]

    async def _scored(
        self, samples: Sequence[TrainingSample], header: trainer_pb2.ComputeLogProbsHeader
    ) -> list[trainer_pb2.TokenLogProbs]:
        chunks = encode.training_chunks(samples)

        async def give(command: types_pb2.CommandId, timeout_s: float) -> list[trainer_pb2.TokenLogProbs]:
            def messages() -> Iterator[trainer_pb2.ComputeLogProbsRequest]:
                yield trainer_pb2.ComputeLogProbsRequest(header=header)
                for chunk in chunks:
                    yield trainer_pb2.ComputeLogProbsRequest(samples=chunk)

            call, whole = (await self._connection.trainer()).ComputeLogProbs(messages(), timeout=timeout_s), Whole()
            return [one async for response in call for one in whole.samples(response.samples)]

        return encode.complete(await self._connection.train(give), num_samples=len(samples))

    async def compute_values(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        """Computes the critic's value of each completion token, given the tokens before it: [T] for each sample, in order.

        Raises InvalidArgument if the node has no critic.
        """
        chunks = encode.training_chunks(samples)

        async def give(command: types_pb2.CommandId, timeout_s: float) -> list[NDArray[np.float32]]:
            messages = (trainer_pb2.ComputeValuesRequest(samples=chunk) for chunk in chunks)
            call = (await self._connection.trainer()).ComputeValues(messages, timeout=timeout_s)
            return [np.array(one.values, dtype=np.float32) async for response in call for one in response.samples]

        return encode.complete(await self._connection.train(give), num_samples=len(samples))

    async def save(self, path: Path | str, *, request_id: str | None = None) -> SaveResult:
        """Saves model, optimizer, random state and version to a new folder, for `load`.

        Raises PathExists, DiskFull, and PermissionDenied for a folder outside those that clients may write to.
        """
        folder = encode.path_to_send(path)
        request = trainer_pb2.SaveCheckpointRequest(path=folder)
        done = await self._train(request, lambda trainer: trainer.SaveCheckpoint, request_id=request_id)
        return SaveResult(folder, done.policy_version, done.bytes, done.seconds)

    async def load(self, path: Path | str) -> int:
        """Loads a checkpoint written by `save`, with its optimizer state and schedule. Returns the policy version.

        That is the checkpoint's, or a new one if the trainer's is newer: versions only grow. Raises GradientsPending if
        accumulated gradients await a step, PathNotFound, PathPermissionDenied, and InvalidArgument for a checkpoint that is damaged or
        belongs to another model.
        """
        request = trainer_pb2.LoadCheckpointRequest(path=encode.path_to_send(path))
        return (await self._train(request, lambda trainer: trainer.LoadCheckpoint)).policy_version

    async def export_model(self, path: Path | str) -> SaveResult:
        """Exports the model to a new folder in Hugging Face format, for AutoModelForCausalLM.from_pretrained. Raises as `save`."""
        folder = encode.path_to_send(path)
        done = await self._train(trainer_pb2.ExportModelRequest(path=folder), lambda trainer: trainer.ExportModel)
        return SaveResult(folder, done.policy_version, done.bytes, done.seconds)

    async def begin_acquire(self, phase: Phase) -> None:
        """Starts what `acquire` does and returns at once. The next verb that needs a phase waits for it and raises its error."""
        await self._connection.begin_acquire(phase)

    async def acquire(self, phase: Phase) -> list[StageEvent]:
        """Brings the node to a phase. Returns the stages carried out, including those started by `begin_acquire`.

        Returns one event HELD if the node was already in the phase.

        Raises OutOfGpuMemory with the missing bytes, GradientsPending if accumulated gradients await a step, and ChangeoverRunning while
        another client moves the node to the other phase.
        """
        return await self._connection.acquire(phase)

    async def state(self) -> NodeState:
        """Returns the node's current state from the coordinator. Fields that may be absent say so: `state.HasField("policy_version")`."""
        return await self._connection.refresh()

    async def trainer_state(self) -> TrainerState:
        """Returns the trainer's current state."""
        stub = await self._connection.trainer()
        request = trainer_pb2.GetTrainerStateRequest()
        return await self._connection.read(lambda: stub.GetTrainerState(request, timeout=READ_TIMEOUT_S))

    async def rollout_state(self) -> RolloutState:
        """Returns rollout's current state."""
        stub = await self._connection.rollout()
        request = rollout_pb2.GetRolloutStateRequest()
        return await self._connection.read(lambda: stub.GetRolloutState(request, timeout=READ_TIMEOUT_S))

    async def watch(self) -> AsyncGenerator[Watched, None]:
        """Yields the current state, then the new state after each change, until the caller stops."""
        await self._connection.refresh()
        call = self._connection.coordinator.WatchState(coordinator_pb2.WatchStateRequest())
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    async def changeovers(self, *, limit: int = 50) -> list[Changeover]:
        """Returns the latest changeovers in the journal, newest first."""
        if not isinstance(limit, int) or limit < 0:  # callers may have no types
            raise InvalidArgument("limit", f"is {limit!r}; give a whole number of changeovers, at least 0")
        return await self._connection.changeovers(limit)

    async def _train(
        self,
        request: _Request,
        method: "Callable[[TrainerServiceAsyncStub], Callable[..., Awaitable[_Answer]]]",
        *,
        request_id: str | None = None,
    ) -> _Answer:
        """Sends a command of the trainer, with an id, in phase TRAIN."""

        async def give(command: types_pb2.CommandId, timeout_s: float) -> _Answer:
            request.command.CopyFrom(command)
            return await method(await self._connection.trainer())(request, timeout=timeout_s)

        return await self._connection.train(give, request_id=request_id)

    @property
    def _connection(self) -> Connection:
        if self._opened is None:
            self._opened = Connection(
                self._target,
                timeout_s=self._timeout_s,
                recovery_timeout_s=self._recovery_timeout_s,
                credentials=self._credentials,
                tracer=open_tracer(self._otlp_endpoint, service="client", headers=self._otlp_headers),
            )
        return self._opened
