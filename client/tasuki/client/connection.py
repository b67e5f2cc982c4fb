"""Channels to one node, what its coordinator last said, and how a command is given exactly once."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio

from tasuki.client.encode import state_from_proto
from tasuki.client.types import NodeState, Phase
from tasuki.v1 import coordinator_pb2, types_pb2
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.rollout_pb2_grpc import RolloutServiceStub
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.wire.address import unix_target
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import DeadlineExceeded, InvalidArgument, PeerUnavailable, StaleEpoch, from_rpc_error

if TYPE_CHECKING:
    from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub
    from tasuki.v1.rollout_pb2_grpc import RolloutServiceAsyncStub
    from tasuki.v1.trainer_pb2_grpc import TrainerServiceAsyncStub

READ_TIMEOUT_S = 10.0
_MAX_REPEATS = 2
_REPEAT_AFTER_S = 0.2
_Answer = TypeVar("_Answer")


def resolve_target(target: str | None, state_dir: Path | str | None) -> str:
    """The coordinator's gRPC target. Raises InvalidArgument unless exactly one of the two is given."""
    if (target is None) is (state_dir is None):
        raise InvalidArgument("target", "give either the coordinator's gRPC target or the node's state_dir")
    return target if target is not None else unix_target(Path(state_dir or ""), service="coordinator")


class Connection:
    """Made and used inside one event loop."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._coordinator_channel = open_channel(target)
        self.coordinator: CoordinatorServiceAsyncStub = CoordinatorServiceStub(self._coordinator_channel)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.epoch = 0
        self.phase: Phase | None = None
        """That the node is believed to be in; a service that knows better refuses the call."""
        self._trainer_target = self._rollout_target = ""

    async def refresh(self) -> NodeState:
        """Asks the coordinator where the node stands and where its services are."""
        try:
            response = await self.coordinator.GetState(coordinator_pb2.GetStateRequest(), timeout=READ_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            if isinstance(failure, PeerUnavailable):
                raise PeerUnavailable(
                    f"no coordinator answers at {self._target}; is the node up?", peer=self._target
                ) from error
            raise failure from error
        self.take(response.state)
        return state_from_proto(response.state)

    def take(self, state: coordinator_pb2.NodeState) -> None:
        """Remembers what a message of the coordinator says of the node."""
        self.epoch, self.phase = state.epoch, state_from_proto(state).phase
        self._trainer_target, self._rollout_target = state.trainer_target, state.rollout_target

    async def trainer(self) -> TrainerServiceAsyncStub:
        if not self._trainer_target:
            await self.refresh()
        return TrainerServiceStub(self._channel(self._trainer_target))

    async def rollout(self) -> RolloutServiceAsyncStub:
        if not self._rollout_target:
            await self.refresh()
        return RolloutServiceStub(self._channel(self._rollout_target))

    async def command(self, give: Callable[[types_pb2.CommandId, float], Awaitable[_Answer]], *, timeout_s: float) -> _Answer:
        """Gives a mutating command; `give` gets its identity and the seconds it may take.

        It is repeated, by the same request id and so without doing anything twice, only when nobody knows whether it was carried
        out, or when it was refused for an old epoch.
        """
        request_id, ends = uuid.uuid4().hex, time.monotonic() + timeout_s
        num_repeats, is_refreshed = 0, False
        if not self.epoch:
            await self.refresh()
        while True:
            command = types_pb2.CommandId(epoch=self.epoch, request_id=request_id)
            try:
                # After its deadline the work goes on: a short repeat may still find the answer.
                return await give(command, max(ends - time.monotonic(), READ_TIMEOUT_S if num_repeats else timeout_s))
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                if isinstance(failure, StaleEpoch) and not is_refreshed:
                    is_refreshed = True
                    await self.refresh()
                elif isinstance(failure, PeerUnavailable | DeadlineExceeded) and num_repeats < _MAX_REPEATS:
                    num_repeats += 1
                    await asyncio.sleep(_REPEAT_AFTER_S * num_repeats)
                else:
                    raise failure from error

    async def close(self) -> None:
        for channel in (self._coordinator_channel, *self._channels.values()):
            await channel.close(grace=None)

    def _channel(self, target: str) -> grpc.aio.Channel:
        if target not in self._channels:
            self._channels[target] = open_channel(target)
        return self._channels[target]
