"""tasuki.v1.TrainerService over a fleet's nodes: clients see a single, larger trainer.

All nodes validate a command before any begins, so that none waits in a collective for a node that refuses.
"""

import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tasuki.algorithms.aggregation import call_denominator
from tasuki.fleet.nodes import FleetNodes, NodeChannels, on_all
from tasuki.fleet.rules import merged_trainer_state, refuse_stage, renumbered
from tasuki.rpc.commands import PASSING, CommandGate, chunks, digest, remaining_s
from tasuki.trainer.durable.saves import save_id_of
from tasuki.trainer.service.requests import (
    MAX_ANSWERED_TOKENS,
    read_compute_log_probs,
    read_compute_values,
    read_forward_backward,
)
from tasuki.trainer.wire import decode_loss, merge_metrics, merge_parts
from tasuki.v1 import trainer_pb2
from tasuki.v1.trainer_pb2_grpc import TrainerServiceServicer, TrainerServiceStub
from tasuki.v1.types_pb2 import CommandId, TrainingSample
from tasuki.wire.errors import (
    DeadlineExceeded,
    FleetEnded,
    InternalError,
    InvalidArgument,
    PeerUnavailable,
    TasukiError,
    VersionOrder,
)
from tasuki.wire.images import restore, send_once
from tasuki.wire.routes import Whole, in_parts

if TYPE_CHECKING:
    from tasuki.v1.trainer_pb2_grpc import TrainerServiceAsyncStub

Deal: TypeAlias = Callable[[Sequence[int], Sequence[int]], list[list[int]]]
"""Assigns samples to nodes, deterministically, by their numbers of tokens and of a completion's."""
_Shares: TypeAlias = Sequence[Sequence[int]]
"""Positions in the call of each node's samples."""

_log = logging.getLogger("tasuki.fleet")
_READ_TIMEOUT_S = 10.0
_PASSING = (*PASSING, PeerUnavailable, DeadlineExceeded, FleetEnded)
"""Errors after which a repeated command is sent to the nodes again: each recognizes its id if it has already run it."""
_Answer = TypeVar("_Answer")


def _validated(method: str, *, version: str = "policy_version") -> Any:
    """An RPC that runs on all nodes once all of them have validated its request. version: of the answers, equal on all nodes."""

    async def run(self: "TrainerFront", request: Any, context: Any) -> Any:
        calls = self._calls(context)
        return await self._gate.once(request, lambda: calls.validated(method, request, version=version))

    return run


class TrainerFront(TrainerServiceServicer):
    """Sends every command to all nodes, and each node its share of the samples."""

    PublishWeights = WithdrawWeights = refuse_stage
    BeginRun = _validated("BeginRun")
    OptimStep = _validated("OptimStep", version="version")
    LoadCheckpoint = _validated("LoadCheckpoint")

    def __init__(self, nodes: FleetNodes, *, epoch: int, deal: Deal) -> None:
        """epoch: of the fleet's coordinator."""
        self._nodes, self._deal = nodes, deal
        self._gate = CommandGate(passing=_PASSING)
        self._gate.epoch = epoch

    async def ForwardBackward(
        self, request_iterator: AsyncIterator[trainer_pb2.ForwardBackwardRequest], context: Any
    ) -> trainer_pb2.ForwardBackwardResponse:
        header, samples = await read_forward_backward(request_iterator)
        calls = self._calls(context)

        async def forward_backward() -> trainer_pb2.ForwardBackwardResponse:
            started = time.perf_counter()
            _check(header, samples)
            named, denominator = deepcopy(header), _denominator(header, samples)
            named.is_own_denominator = "denominator" not in header.loss.settings
            named.loss.settings["denominator"], named.call_samples = denominator, len(samples)
            restore(samples)
            shares = self._shares(samples)
            merged = _merged(await calls.forward_backward(named, samples, shares), header.log_probs_of, shares)
            merged.denominator, merged.seconds = denominator, time.perf_counter() - started
            return merged

        return await self._gate.once(header, forward_backward, content=digest(header, samples))

    async def DiscardGradients(
        self, request: trainer_pb2.DiscardGradientsRequest, context: Any
    ) -> trainer_pb2.DiscardGradientsResponse:
        calls = self._calls(context)
        return (await self._gate.once(request, lambda: calls.unary("DiscardGradients", request)))[0]

    async def ExportModel(self, request: trainer_pb2.ExportModelRequest, context: Any) -> trainer_pb2.ExportModelResponse:
        """Exported by node 0: each node has all weights."""
        calls = TrainerCalls(self._nodes.all()[:1], remaining_s(context))
        return (await self._gate.once(request, lambda: calls.unary("ExportModel", request)))[0]

    async def ComputeLogProbs(
        self, request_iterator: AsyncIterator[trainer_pb2.ComputeLogProbsRequest], context: Any
    ) -> AsyncIterator[trainer_pb2.ComputeLogProbsResponse]:
        header, samples = await read_compute_log_probs(request_iterator)
        first = [trainer_pb2.ComputeLogProbsRequest(header=header)]
        scored = await self._score("ComputeLogProbs", trainer_pb2.ComputeLogProbsRequest, samples, context, first=first)
        for chunk in chunks(list(in_parts(scored))):
            yield trainer_pb2.ComputeLogProbsResponse(samples=chunk)

    async def ComputeValues(
        self, request_iterator: AsyncIterator[trainer_pb2.ComputeValuesRequest], context: Any
    ) -> AsyncIterator[trainer_pb2.ComputeValuesResponse]:
        samples = await read_compute_values(request_iterator)
        for chunk in chunks(await self._score("ComputeValues", trainer_pb2.ComputeValuesRequest, samples, context)):
            yield trainer_pb2.ComputeValuesResponse(samples=chunk)

    async def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: Any
    ) -> trainer_pb2.SaveCheckpointResponse:
        calls = self._calls(context)

        async def part(name: str) -> list[Any]:
            named = deepcopy(request)
            named.save_id = save_id_of(request.command.request_id)
            named.part = trainer_pb2.SavePart.Value(f"SAVE_PART_{name}")
            return await calls.unary("SaveCheckpoint", named, part=name)

        async def save() -> trainer_pb2.SaveCheckpointResponse:
            started = time.perf_counter()
            try:
                written = await part("WRITE")
                version = one_version(written)
            except TasukiError:
                with suppress(TasukiError):  # the first error is raised
                    await part("DROP")
                raise
            await part("PUBLISH")
            _log.info("event=checkpoint policy_version=%d path=%a", version, request.path)
            num_bytes, seconds = sum(answer.bytes for answer in written), time.perf_counter() - started
            return trainer_pb2.SaveCheckpointResponse(policy_version=version, bytes=num_bytes, seconds=seconds)

        return await self._gate.once(request, save)

    async def GetTrainerState(
        self, request: trainer_pb2.GetTrainerStateRequest, context: Any
    ) -> trainer_pb2.GetTrainerStateResponse:
        asked = trainer_pb2.GetTrainerStateRequest()
        states = await on_all(
            self._nodes.all(), lambda _, node: TrainerServiceStub(node.trainer).GetTrainerState(asked, timeout=_READ_TIMEOUT_S)
        )
        return merged_trainer_state(states)

    async def _score(
        self, method: str, request: Any, samples: Sequence[TrainingSample], context: Any, *, first: Sequence[Any] = ()
    ) -> list[Any]:
        """Scores in the order of the samples. Nodes without samples are not called, since scoring involves no other node.

        Raises InternalError if a node has not scored its whole share.
        """
        restore(samples)
        shares, calls = self._shares(_required(samples)), self._calls(context)

        async def score(rank: int, stub: Any) -> list[Any]:
            if not shares[rank]:
                return []
            parts = chunks(_sent(samples, shares[rank]))
            messages = [*first, *(request(samples=trainer_pb2.TrainingSamples(samples=part)) for part in parts)]
            call = getattr(stub, method)(iter(messages), timeout=calls.remaining_s)
            whole = Whole().samples if request is trainer_pb2.ComputeLogProbsRequest else iter
            return [scored async for response in call for scored in whole(response.samples)]

        rows: dict[int, Any] = {}
        for rank, (scored, share) in enumerate(zip(await calls.on_shares(shares, score), shares, strict=True)):
            if len(scored) != len(share):
                text = f"the trainer of node {rank} answered for {len(scored)} of {len(share)} samples"
                raise InternalError(text, node_rank=rank)
            rows.update(zip(share, scored, strict=True))
        return [rows[position] for position in range(len(samples))]

    def _calls(self, context: Any) -> "TrainerCalls":
        """Raises NotJoined and FleetEnded."""
        return TrainerCalls(self._nodes.all(), remaining_s(context))

    def _shares(self, samples: Sequence[TrainingSample]) -> list[list[int]]:
        completions = [len(sample.completion_token_ids) for sample in samples]
        lengths = [len(sample.prompt_token_ids) + length for sample, length in zip(samples, completions, strict=True)]
        return self._deal(lengths, completions)


class TrainerCalls:
    """Calls to the trainers of all nodes, within the caller's deadline."""

    def __init__(self, nodes: Sequence[NodeChannels], timeout_s: float) -> None:
        self._nodes, self._ends = nodes, time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        return max(0.1, self._ends - time.monotonic())

    async def on_all(self, call: "Callable[[int, TrainerServiceAsyncStub], Awaitable[_Answer]]") -> list[_Answer]:
        return await on_all(self._nodes, lambda rank, node: call(rank, TrainerServiceStub(node.trainer)))

    async def unary(self, method: str, request: Any, *, part: str = "") -> list[Any]:
        """Sends the same request to all nodes and returns their answers. part: of a command that is split at a node."""
        return await self.on_all(lambda _, stub: getattr(stub, method)(_at_node(request, part=part), timeout=self.remaining_s))

    async def validated(self, method: str, request: Any, *, version: str) -> Any:
        """One of the answers, which are alike, after all nodes have validated the request and reported the same `version`."""
        validating = deepcopy(request)
        validating.validate_only = True
        one_version(await self.unary(method, validating), field=version)
        answers = await self.unary(method, request)
        one_version(answers, field=version)
        return answers[0]

    async def forward_backward(
        self, header: trainer_pb2.ForwardBackwardHeader, samples: Sequence[TrainingSample], shares: _Shares
    ) -> list[trainer_pb2.ForwardBackwardResponse]:
        """header: with the denominator of the whole call. Each node gets its share, even an empty one.

        If a node fails after others have added gradients, the role's gradients are cleared on all nodes: no step uses half a batch.
        """

        async def call(rank: int, stub: "TrainerServiceAsyncStub", *, validate_only: bool) -> Any:
            places = {position: place for place, position in enumerate(shares[rank])}
            named = _at_node(header)
            named.is_share, named.validate_only, named.num_samples = True, validate_only, len(shares[rank])
            named.log_probs_of[:] = [places[position] for position in header.log_probs_of if position in places]
            parts = (trainer_pb2.TrainingSamples(samples=part) for part in chunks(_sent(samples, shares[rank])))
            messages = [trainer_pb2.ForwardBackwardRequest(samples=part) for part in parts]
            first = trainer_pb2.ForwardBackwardRequest(header=named)
            return await stub.ForwardBackward(iter([first, *messages]), timeout=self.remaining_s)

        await self.on_shares(shares, lambda rank, stub: call(rank, stub, validate_only=True))
        try:
            return await self.on_shares(shares, lambda rank, stub: call(rank, stub, validate_only=False))
        except TasukiError as error:
            discard = trainer_pb2.DiscardGradientsRequest(command=header.command, role=header.role)
            with suppress(TasukiError):  # the first error is raised
                await self.unary("DiscardGradients", discard, part="discard")
            _log.error("event=gradients_discarded cause=%s request_id=%a", error.reason, header.command.request_id)
            raise

    async def on_shares(
        self, shares: _Shares, call: "Callable[[int, TrainerServiceAsyncStub], Awaitable[_Answer]]"
    ) -> list[_Answer]:
        """Same as on_all; errors name the sample by its position in the whole call."""
        try:
            return await self.on_all(call)
        except TasukiError as error:
            positions = shares[int(error.metadata["node_rank"])]
            raise renumbered(error, field="samples", positions=positions) from error


def _at_node(request: Any, *, part: str = "") -> Any:
    """The request as sent to a node: without the fleet's epoch, and with a request id per part."""
    named, request_id = deepcopy(request), request.command.request_id
    if part:
        request_id = hashlib.sha256(f"{request_id}/{part}".encode()).hexdigest()
    named.command.CopyFrom(CommandId(request_id=request_id))
    return named


def one_version(answers: Sequence[Any], *, field: str = "policy_version") -> int:
    """The version of all nodes. Raises VersionOrder if they differ."""
    versions = [getattr(answer, field) for answer in answers]
    if len(set(versions)) > 1:
        text = f"the trainers of the fleet are at different versions, by node: {versions}; load a checkpoint"
        raise VersionOrder(text, have=min(versions), want=max(versions))
    return versions[0]


def _sent(samples: Sequence[TrainingSample], share: Sequence[int]) -> list[TrainingSample]:
    """The samples of a node's share as they are streamed to it."""
    own = [samples[position] for position in share]
    send_once(own)
    return list(in_parts(own))


def _required(samples: Sequence[TrainingSample]) -> Sequence[TrainingSample]:
    """Raises InvalidArgument for a call without samples, although a node's share may have none."""
    if not samples:
        raise InvalidArgument("samples", "the call has no samples")
    return samples


def _check(header: trainer_pb2.ForwardBackwardHeader, samples: Sequence[TrainingSample]) -> None:
    """Checks what no node sees in its share. Raises InvalidArgument."""
    field, positions = "header.log_probs_of", header.log_probs_of
    if positions and max(positions) >= len(_required(samples)):
        raise InvalidArgument(field, f"names sample {max(positions)}, but the call has {len(samples)}")
    named = sum(len(samples[position].completion_token_ids) for position in positions)
    if named > MAX_ANSWERED_TOKENS:
        raise InvalidArgument(field, f"names {named} tokens; at most {MAX_ANSWERED_TOKENS} fit, name fewer samples")


def _denominator(header: trainer_pb2.ForwardBackwardHeader, samples: Sequence[TrainingSample]) -> float:
    """Divisor of the whole call's loss. Raises InvalidArgument if no token counts."""
    lengths = [len(sample.completion_token_ids) for sample in _required(samples)]
    # A mask of wrong length counts all tokens here; the sample's node refuses it.
    masks = [
        list(sample.loss_mask) if len(sample.loss_mask) == length else []
        for sample, length in zip(samples, lengths, strict=True)
    ]
    if not any(any(mask) or not mask for mask in masks):
        raise InvalidArgument("samples[].loss_mask", "masks every token of the call; at least one must count")
    return call_denominator(masks, lengths, config=decode_loss(header.loss))


def _merged(
    answers: Sequence[trainer_pb2.ForwardBackwardResponse], log_probs_of: Sequence[int], shares: _Shares
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
        metrics=merge_metrics(merge_parts([answer.metric_parts for answer in answers])),
        num_micro_batches=sum(answer.num_micro_batches for answer in answers),
        log_probs=[rows[position] for position in log_probs_of if position in rows],
    )
