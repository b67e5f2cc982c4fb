"""Commands to a fleet's trainers: all nodes validate before any begins, so that none waits for a node that refuses."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tasuki.fleet.calls import on_all, renumbered
from tasuki.fleet.nodes import NodeChannels
from tasuki.rpc.chunks import chunks
from tasuki.v1 import trainer_pb2
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.v1.types_pb2 import CommandId, TrainingSample
from tasuki.wire.errors import TasukiError, VersionOrder

if TYPE_CHECKING:
    from tasuki.v1.trainer_pb2_grpc import TrainerServiceAsyncStub

_log = logging.getLogger("tasuki.fleet")
_Answer = TypeVar("_Answer")
Share = Sequence[int]
"""Positions of a node's samples in the call."""


@dataclass(frozen=True, slots=True)
class TrainerCalls:
    """Calls to the trainers of all nodes, within the caller's deadline."""

    nodes: Sequence[NodeChannels]
    timeout_s: float
    started: float

    @classmethod
    def within(cls, nodes: Sequence[NodeChannels], timeout_s: float) -> TrainerCalls:
        return cls(nodes, timeout_s, time.monotonic())

    @property
    def remaining_s(self) -> float:
        return max(0.1, self.timeout_s - (time.monotonic() - self.started))

    async def unary(self, method: str, request: Any, *, part: str = "") -> list[Any]:
        """Sends the same request to all nodes and returns their answers. part: of a command that is split at a node."""
        return await self.on_all(lambda _, stub: getattr(stub, method)(at_node(request, part=part), timeout=self.remaining_s))

    async def validated(self, method: str, request: Any, *, version: str = "policy_version") -> list[Any]:
        """Same as `unary`, after all nodes have validated the request and reported the same `version`."""
        looked = type(request)()
        looked.CopyFrom(request)
        looked.validate_only = True
        try:
            one_version(await self.unary(method, looked, part="validate"), field=version)
        except TasukiError as error:
            # If all refuse, none has begun, unless all completed it before this process restarted: then they repeat their answers.
            if not await self._refuse_alike(method, looked, error):
                raise
        answers = await self.unary(method, request)
        one_version(answers, field=version)
        return answers

    async def _refuse_alike(self, method: str, looked: Any, error: TasukiError) -> bool:
        refusals = [await self._refusal(node, method, looked) for node in self.nodes]
        return all(refusal == error.reason for refusal in refusals)

    async def _refusal(self, node: NodeChannels, method: str, looked: Any) -> str:
        try:
            await TrainerCalls([node], self.timeout_s, self.started).unary(method, looked, part="validate")
        except TasukiError as error:
            return error.reason
        return ""

    async def forward_backward(
        self, header: trainer_pb2.ForwardBackwardHeader, samples: Sequence[TrainingSample], shares: Sequence[Share]
    ) -> list[trainer_pb2.ForwardBackwardResponse]:
        """header: with the denominator of the whole call. Each node gets its share, even an empty one.

        If a node fails after others have added gradients, the role's gradients are cleared on all nodes: no step uses half a batch.
        """
        places = [{position: place for place, position in enumerate(share)} for share in shares]

        def messages(rank: int, *, validate_only: bool) -> list[trainer_pb2.ForwardBackwardRequest]:
            named = at_node(header, part="validate" if validate_only else "")
            named.is_share, named.validate_only = True, validate_only
            named.log_probs_of[:] = [places[rank][position] for position in header.log_probs_of if position in places[rank]]
            share = [samples[position] for position in shares[rank]]
            return [
                trainer_pb2.ForwardBackwardRequest(header=named),
                *(
                    trainer_pb2.ForwardBackwardRequest(samples=trainer_pb2.TrainingSamples(samples=chunk))
                    for chunk in chunks(share)
                ),
            ]

        async def call(rank: int, stub: TrainerServiceAsyncStub, *, validate_only: bool) -> Any:
            return await stub.ForwardBackward(iter(messages(rank, validate_only=validate_only)), timeout=self.remaining_s)

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
        self, shares: Sequence[Share], call: Callable[[int, TrainerServiceAsyncStub], Awaitable[_Answer]]
    ) -> list[_Answer]:
        """Same as on_all; errors name the sample by its position in the whole call."""
        try:
            return await self.on_all(call)
        except TasukiError as error:
            node = error.metadata.get("node")
            raise (error if node is None else renumbered(error, field="samples", positions=shares[int(node)])) from error

    async def on_all(self, call: Callable[[int, TrainerServiceAsyncStub], Awaitable[_Answer]]) -> list[_Answer]:
        return await on_all(self.nodes, lambda rank, node: call(rank, TrainerServiceStub(node.trainer)))


def at_node(request: Any, *, part: str = "") -> Any:
    """The request as sent to a node: without the fleet's epoch, and with a request id per part."""
    named = type(request)()
    named.CopyFrom(request)
    request_id = request.command.request_id
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
