"""Calls to one node's coordinator, each with a deadline and a sequence number, so that none takes effect late."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import grpc
import grpc.aio

from tasuki.config.schema import CoordinatorConfig
from tasuki.coordinator.encode import phase_to_proto
from tasuki.fleet.nodes import FleetNodes
from tasuki.fleet.records import NodeView, StageAnswer, Sums
from tasuki.memory.stages import Phase, Stage
from tasuki.rpc.stages import stage_from_proto, stage_to_proto
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.fleet_pb2 import FleetCommand
from tasuki.wire.errors import DeadlineExceeded, PeerUnavailable, TasukiError, from_rpc_error

if TYPE_CHECKING:
    from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub

_MARGIN_S = 5.0
"""Lets the node's own error arrive before the deadline."""


class NodePeer(Protocol):
    """Operations of the fleet on a node. Every call may raise TasukiError."""

    rank: int

    async def look(self) -> NodeView:
        """Returns the node's place as its services report it, after running work. Commands sent earlier no longer take effect."""
        ...

    async def run_stage(self, stage: Stage, request_id: str) -> StageAnswer:
        """Runs the next stage of the ring."""
        ...

    async def acquire_train(self, request_id: str) -> NodeView:
        """Brings the node to TRAIN from any place."""
        ...


class GrpcNodePeer:
    """A node by rank."""

    def __init__(self, nodes: FleetNodes, rank: int, config: CoordinatorConfig) -> None:
        self.rank = rank
        self._nodes, self._config = nodes, config
        self._sequence = 0

    async def look(self) -> NodeView:
        request = pb.GetStateRequest(fleet=self._command())
        try:
            answer = await self._stub().GetState(request, timeout=self._config.stage_timeout_s + _MARGIN_S)
        except grpc.aio.AioRpcError as error:
            raise self._named(error) from error
        return self._view(answer.state)

    async def run_stage(self, stage: Stage, request_id: str) -> StageAnswer:
        request = pb.RunStageRequest(stage=stage_to_proto(stage), request_id=request_id, fleet=self._command())
        drain_s = self._config.drain_grace_s if stage is Stage.DRAIN else 0.0
        try:
            answer = await self._stub().RunStage(request, timeout=self._config.stage_timeout_s + drain_s + _MARGIN_S)
        except grpc.aio.AioRpcError as error:
            raise self._named(error) from error
        sums = Sums.from_proto(answer.sums) if answer.HasField("sums") else None
        return StageAnswer(self._view(answer.state), answer.event.bytes, sums)

    async def acquire_train(self, request_id: str) -> NodeView:
        request = pb.AcquireRequest(phase=phase_to_proto(Phase.TRAIN), request_id=request_id, fleet=self._command())
        timeout_s = self._config.recovery_timeout_s + len(Stage) * self._config.stage_timeout_s
        state = pb.NodeState()
        try:
            async for answer in self._stub().Acquire(request, timeout=timeout_s):
                state = answer.state
        except grpc.aio.AioRpcError as error:
            raise self._named(error) from error
        return self._view(state)

    def _stub(self) -> CoordinatorServiceAsyncStub:
        return CoordinatorServiceStub(self._nodes[self.rank].coordinator)

    def _command(self) -> FleetCommand:
        self._sequence += 1
        command = FleetCommand(sequence=self._sequence)
        command.MergeFrom(self._nodes.command)
        return command

    def _view(self, state: pb.NodeState) -> NodeView:
        return NodeView(
            self.rank,
            stage_from_proto(state.stage),
            boot_id=state.boot_id,
            policy_version=state.policy_version if state.HasField("policy_version") else None,
            weights_digest=state.weights_digest,
            last_error=state.last_error,
        )

    def _named(self, rpc_error: grpc.aio.AioRpcError) -> TasukiError:
        error = from_rpc_error(rpc_error)
        if isinstance(error, PeerUnavailable | DeadlineExceeded) and "peer" not in error.metadata:
            return type(error)(f"its coordinator did not answer: {error.message}", peer=f"node {self.rank}")
        return error
