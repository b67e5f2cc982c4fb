"""tasuki.v1.TrainerService over a fleet's nodes: clients see a single, larger trainer."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from tasuki.fleet.calls import Nodes
from tasuki.fleet.rollout_front import no_stage_here
from tasuki.fleet.samples import check_log_probs_of, loss_denominator, num_tokens, read_stream, require
from tasuki.fleet.states import merged_trainer_state
from tasuki.fleet.trainer_calls import Share, TrainerCalls, one_version
from tasuki.rpc.chunks import chunks
from tasuki.rpc.commands import CommandGate, digest
from tasuki.rpc.deadlines import remaining_s
from tasuki.trainer.ranks.loss import decode_loss
from tasuki.v1 import trainer_pb2
from tasuki.v1.trainer_pb2_grpc import TrainerServiceServicer
from tasuki.v1.types_pb2 import TrainingSample
from tasuki.wire.errors import DeadlineExceeded, DiskFull, FleetEnded, InternalError, PeerUnavailable, TasukiError

Deal: TypeAlias = Callable[[Sequence[int], Sequence[int]], list[list[int]]]
"""Assigns samples to nodes, deterministically, by their numbers of tokens and of a completion's."""

_log = logging.getLogger("tasuki.fleet")
_READ_TIMEOUT_S = 10.0
_PASSING = (DiskFull, PeerUnavailable, DeadlineExceeded, FleetEnded)
"""Errors after which a repeated command is sent to the nodes again: each recognizes its id if it has already run it."""
_Scored = TypeVar("_Scored", trainer_pb2.TokenLogProbs, trainer_pb2.TokenValues)


class TrainerFront(TrainerServiceServicer):
    """Sends every command to all nodes, and each node its share of the samples."""

    def __init__(self, nodes: Nodes, *, epoch: int, deal: Deal) -> None:
        """epoch: of the fleet's coordinator."""
        self._nodes, self._deal = nodes, deal
        self._gate = CommandGate(passing=_PASSING)
        self._gate.epoch = epoch

    async def BeginRun(self, request: trainer_pb2.BeginRunRequest, context: Any) -> trainer_pb2.BeginRunResponse:
        calls = self._calls(context)

        async def begin() -> trainer_pb2.BeginRunResponse:
            return (await calls.validated("BeginRun", request))[0]

        return await self._gate.once(request, begin)

    async def ForwardBackward(
        self, request_iterator: AsyncIterator[trainer_pb2.ForwardBackwardRequest], context: Any
    ) -> trainer_pb2.ForwardBackwardResponse:
        header, samples = await read_stream(request_iterator)
        calls = self._calls(context)

        async def forward_backward() -> trainer_pb2.ForwardBackwardResponse:
            started = time.perf_counter()
            check_log_probs_of(header, samples)
            named = trainer_pb2.ForwardBackwardHeader()
            named.CopyFrom(header)
            denominator = loss_denominator(samples, decode_loss(header.loss))
            named.loss.settings["denominator"] = denominator
            shares = self._shares(samples)
            merged = _merged(await calls.forward_backward(named, samples, shares), header.log_probs_of, shares)
            merged.denominator, merged.seconds = denominator, time.perf_counter() - started
            return merged

        return await self._gate.once(header, forward_backward, content=digest(header, samples))

    async def OptimStep(self, request: trainer_pb2.OptimStepRequest, context: Any) -> trainer_pb2.OptimStepResponse:
        calls = self._calls(context)

        async def step() -> trainer_pb2.OptimStepResponse:
            answers = await calls.validated("OptimStep", request, version="version")
            answers[0].seconds = max(answer.seconds for answer in answers)
            return answers[0]

        return await self._gate.once(request, step)

    async def DiscardGradients(
        self, request: trainer_pb2.DiscardGradientsRequest, context: Any
    ) -> trainer_pb2.DiscardGradientsResponse:
        calls = self._calls(context)

        async def discard() -> trainer_pb2.DiscardGradientsResponse:
            return (await calls.unary("DiscardGradients", request))[0]

        return await self._gate.once(request, discard)

    async def ComputeLogProbs(
        self, request_iterator: AsyncIterator[trainer_pb2.ComputeLogProbsRequest], context: Any
    ) -> AsyncIterator[trainer_pb2.ComputeLogProbsResponse]:
        header, samples = await read_stream(request_iterator)

        def messages(share: Sequence[TrainingSample]) -> list[trainer_pb2.ComputeLogProbsRequest]:
            parts = (trainer_pb2.TrainingSamples(samples=chunk) for chunk in chunks(share))
            first = trainer_pb2.ComputeLogProbsRequest(header=header)
            return [first, *(trainer_pb2.ComputeLogProbsRequest(samples=part) for part in parts)]

        for chunk in chunks(await self._score(samples, "ComputeLogProbs", messages, context)):
            yield trainer_pb2.ComputeLogProbsResponse(samples=chunk)

    async def ComputeValues(
        self, request_iterator: AsyncIterator[trainer_pb2.ComputeValuesRequest], context: Any
    ) -> AsyncIterator[trainer_pb2.ComputeValuesResponse]:
        samples = require([sample async for request in request_iterator for sample in request.samples.samples])

        def messages(share: Sequence[TrainingSample]) -> list[trainer_pb2.ComputeValuesRequest]:
            parts = (trainer_pb2.TrainingSamples(samples=chunk) for chunk in chunks(share))
            return [trainer_pb2.ComputeValuesRequest(samples=part) for part in parts]

        for chunk in chunks(await self._score(samples, "ComputeValues", messages, context)):
            yield trainer_pb2.ComputeValuesResponse(samples=chunk)

    async def _score(
        self,
        samples: Sequence[TrainingSample],
        method: str,
        messages: Callable[[Sequence[TrainingSample]], list[Any]],
        context: Any,
    ) -> list[Any]:
        """Scores in the order of the samples. Nodes without samples are not called, since scoring involves no other node."""
        shares = self._shares(samples)
        calls = self._calls(context)

        async def score(rank: int, stub: Any) -> list[Any]:
            if not shares[rank]:
                return []
            share = messages([samples[position] for position in shares[rank]])
            call = getattr(stub, method)(iter(share), timeout=calls.remaining_s)
            return [scored async for response in call for scored in response.samples]

        return _in_order(await calls.on_shares(shares, score), shares, num_samples=len(samples))

    async def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: Any
    ) -> trainer_pb2.SaveCheckpointResponse:
        calls = self._calls(context)

        async def save() -> trainer_pb2.SaveCheckpointResponse:
            started = time.perf_counter()
            part = trainer_pb2.SaveCheckpointRequest()
            part.CopyFrom(request)
            part.save_id = hashlib.sha256(request.command.request_id.encode()).hexdigest()[:32]
            part.part = trainer_pb2.SAVE_PART_WRITE
            try:
                written = await calls.unary("SaveCheckpoint", part, part="write")
                version = one_version(written)
            except TasukiError:
                part.part = trainer_pb2.SAVE_PART_DROP
                with suppress(TasukiError):  # the first error is raised
                    await calls.unary("SaveCheckpoint", part, part="drop")
                raise
            part.part = trainer_pb2.SAVE_PART_PUBLISH
            await calls.unary("SaveCheckpoint", part, part="publish")
            _log.info("event=checkpoint policy_version=%d path=%a", version, request.path)
            return trainer_pb2.SaveCheckpointResponse(
                policy_version=version,
                bytes=sum(answer.bytes for answer in written),
                seconds=time.perf_counter() - started,
            )

        return await self._gate.once(request, save)

    async def LoadCheckpoint(
        self, request: trainer_pb2.LoadCheckpointRequest, context: Any
    ) -> trainer_pb2.LoadCheckpointResponse:
        calls = self._calls(context)

        async def load() -> trainer_pb2.LoadCheckpointResponse:
            return (await calls.validated("LoadCheckpoint", request))[0]

        return await self._gate.once(request, load)

    async def ExportModel(self, request: trainer_pb2.ExportModelRequest, context: Any) -> trainer_pb2.ExportModelResponse:
        """Exported by node 0: each node has all weights."""
        nodes = self._nodes.all()[:1]
        calls = TrainerCalls.within(nodes, remaining_s(context))

        async def export() -> trainer_pb2.ExportModelResponse:
            return (await calls.unary("ExportModel", request))[0]

        return await self._gate.once(request, export)

    async def GetTrainerState(
        self, request: trainer_pb2.GetTrainerStateRequest, context: Any
    ) -> trainer_pb2.GetTrainerStateResponse:
        calls = TrainerCalls.within(self._nodes.all(), _READ_TIMEOUT_S)
        asked = trainer_pb2.GetTrainerStateRequest()
        return merged_trainer_state(await calls.on_all(lambda _, stub: stub.GetTrainerState(asked, timeout=calls.remaining_s)))

    async def PublishWeights(
        self, request: trainer_pb2.PublishWeightsRequest, context: Any
    ) -> trainer_pb2.PublishWeightsResponse:
        raise no_stage_here("PublishWeights")

    async def WithdrawWeights(
        self, request: trainer_pb2.WithdrawWeightsRequest, context: Any
    ) -> trainer_pb2.WithdrawWeightsResponse:
        raise no_stage_here("WithdrawWeights")

    def _calls(self, context: Any) -> TrainerCalls:
        """Raises NotJoined and FleetEnded."""
        return TrainerCalls.within(self._nodes.all(), remaining_s(context))

    def _shares(self, samples: Sequence[TrainingSample]) -> list[list[int]]:
        completions = [len(sample.completion_token_ids) for sample in samples]
        return self._deal([num_tokens(sample) for sample in samples], completions)


def _merged(
    answers: Sequence[trainer_pb2.ForwardBackwardResponse], log_probs_of: Sequence[int], shares: Sequence[Share]
) -> trainer_pb2.ForwardBackwardResponse:
    """The answer to a whole call, without its denominator and seconds."""
    rows: dict[int, trainer_pb2.TokenLogProbs] = {}
    for answer, share in zip(answers, shares, strict=True):
        of_node = [position for position in log_probs_of if position in set(share)]
        rows.update(zip(of_node, answer.log_probs, strict=False))  # empty if repeated after a restart
    return trainer_pb2.ForwardBackwardResponse(
        loss=sum(answer.loss for answer in answers),
        num_samples=sum(answer.num_samples for answer in answers),
        num_tokens=sum(answer.num_tokens for answer in answers),
        metrics=joined_metrics([answer.metric_parts for answer in answers]),
        num_micro_batches=sum(answer.num_micro_batches for answer in answers),
        log_probs=[rows[position] for position in log_probs_of if position in rows],
    )


def joined_metrics(parts: Sequence[Mapping[str, trainer_pb2.MetricPart]]) -> dict[str, float]:
    """Merges the metrics of a call's shares; leaves out means over nothing."""
    joined: dict[str, float] = {}
    for name in sorted({name for part in parts for name in part}):
        metrics = [part[name] for part in parts if name in part]
        weight = sum(metric.weight for metric in metrics)
        if metrics[0].is_maximum:
            joined[name] = max(metric.total for metric in metrics)
        elif weight:
            joined[name] = sum(metric.total for metric in metrics) / weight
    return joined


def _in_order(scores: Sequence[Sequence[_Scored]], shares: Sequence[Share], *, num_samples: int) -> list[_Scored]:
    """Raises InternalError if a node has not scored its whole share."""
    for rank, (scored, share) in enumerate(zip(scores, shares, strict=True)):
        if len(scored) != len(share):
            raise InternalError(f"the trainer of node {rank} answered for {len(scored)} of {len(share)} samples", node=rank)
    rows = {
        position: row for scored, share in zip(scores, shares, strict=True) for position, row in zip(share, scored, strict=True)
    }
    return [rows[position] for position in range(num_samples)]
