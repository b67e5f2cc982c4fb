"""Calls to one node's coordinator, each with a deadline and a sequence number, so that none takes effect late."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from tasuki.config.schema import CoordinatorConfig
from tasuki.fleet.nodes import FleetNodes
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.fleet_pb2 import FleetCommand
from tasuki.v1.types_pb2 import PHASE_TRAIN
from tasuki.wire.errors import DeadlineExceeded, PeerUnavailable, from_rpc_error
from tasuki.wire.stages import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub

_MARGIN_S = 5.0
"""Lets the node's own error arrive before the deadline."""


class NodePeer:
    """A node by rank. Every call may raise TasukiError."""

    def __init__(self, nodes: FleetNodes, rank: int, config: CoordinatorConfig) -> None:
        self.rank = rank
        self._nodes, self._config = nodes, config
        self._sequence = 0

    async def look(self) -> pb.NodeState:
        """The node's state as its services report it, after running work. Commands sent earlier no longer take effect."""
        request = pb.GetStateRequest(fleet=self._command())
        with self._named():
            return (await self._stub().GetState(request, timeout=self._config.stage_timeout_s + _MARGIN_S)).state

    async def run_stage(self, stage: Stage, request_id: str) -> pb.RunStageResponse:
        """Runs the next stage of the ring."""
        request = pb.RunStageRequest(stage=stage.number, request_id=request_id, fleet=self._command())
        drain_s = self._config.drain_grace_s if stage is Stage.DRAIN else 0.0
        with self._named():
            return await self._stub().RunStage(request, timeout=self._config.stage_timeout_s + drain_s + _MARGIN_S)

    async def acquire_train(self, request_id: str) -> pb.NodeState:
        """Brings the node to TRAIN from any place."""
        request = pb.AcquireRequest(phase=PHASE_TRAIN, request_id=request_id, fleet=self._command())
        timeout_s = self._config.recovery_timeout_s + len(Stage) * self._config.stage_timeout_s
        state = pb.NodeState()
        with self._named():
            async for answer in self._stub().Acquire(request, timeout=timeout_s):
                state = answer.state
        return state

    def _stub(self) -> CoordinatorServiceAsyncStub:
        return CoordinatorServiceStub(self._nodes[self.rank].coordinator)

    def _command(self) -> FleetCommand:
        self._sequence += 1
        command = FleetCommand(sequence=self._sequence)
        command.MergeFrom(self._nodes.command)
        return command

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            if isinstance(error, PeerUnavailable | DeadlineExceeded) and "peer" not in error.metadata:
                error = type(error)(f"its coordinator did not answer: {error.message}", peer=f"node {self.rank}")
            raise error from rpc_error
