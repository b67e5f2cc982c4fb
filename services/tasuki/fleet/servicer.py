"""FleetService: decode, call, encode. Also the plan that the fleet's CoordinatorService delegates to node 0."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import grpc.aio

from tasuki.fleet.member import callable_node, check_member
from tasuki.fleet.nodes import FleetNodes, Joined
from tasuki.v1 import coordinator_pb2, fleet_pb2, fleet_pb2_grpc
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.wire.errors import FleetEnded, StaleEpoch, from_rpc_error

_PLAN_TIMEOUT_S = 60.0
_Context = grpc.aio.ServicerContext


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """gRPC interface to the members of the fleet. leader: node 0, which the others must match."""

    def __init__(self, nodes: FleetNodes, leader: fleet_pb2.FleetNode) -> None:
        self._nodes, self._leader = nodes, leader

    async def Join(self, request: fleet_pb2.JoinRequest, context: _Context) -> fleet_pb2.JoinResponse:
        shown: Any = context.auth_context()
        names = [name.decode(errors="replace") for name in shown.get("x509_subject_alternative_name", ())]
        node = await asyncio.to_thread(callable_node, request.node, peer=context.peer(), certified=names, resolve=addresses_of)
        check_member(request, self._leader, config=self._nodes.config)
        await self._nodes.join(node)
        return fleet_pb2.JoinResponse(num_joined=len(self._nodes.joined), heartbeat_s=self._nodes.heartbeat_s)

    async def Heartbeat(self, request: fleet_pb2.HeartbeatRequest, context: _Context) -> fleet_pb2.HeartbeatResponse:
        config, rank = self._nodes.config, request.node_rank
        if (request.name, request.attempt) != (config.name, config.attempt):
            raise StaleEpoch(
                f"this is attempt {config.attempt} of fleet {config.name!r}, and not {request.attempt} of {request.name!r}",
                epoch=request.attempt,
                current_epoch=config.attempt,
            )
        skew_s = request.time.ToNanoseconds() * 1e-9 - time.time() if request.HasField("time") else None
        self._nodes.beat(rank, boot_id=request.boot_id, skew_s=skew_s)
        if request.ends_because:
            self._nodes.end(FleetEnded(f"node {rank} {request.ends_because}", node_rank=rank), node_rank=rank)
        return fleet_pb2.HeartbeatResponse(num_joined=len(self._nodes.joined))

    async def GetFleet(self, request: fleet_pb2.GetFleetRequest, context: _Context) -> fleet_pb2.GetFleetResponse:
        nodes = self._nodes
        return fleet_pb2.GetFleetResponse(
            name=nodes.config.name,
            attempt=nodes.config.attempt,
            epoch=nodes.command.epoch,
            num_nodes=nodes.num_nodes,
            members=[self._member(joined) for joined in nodes.joined],
            ended_by="" if nodes.error is None else f"{nodes.error.reason}: {nodes.error.message}",
        )

    def _member(self, joined: Joined) -> fleet_pb2.FleetMember:
        silent_s = round(self._nodes.silent_s(joined), 3)
        member = fleet_pb2.FleetMember(node=joined.node, silent_s=silent_s, clock_skew_s=joined.skew_s)
        member.join_time.FromNanoseconds(int(joined.join_time * 1e9))
        member.node.ClearField("config_keys")
        return member


def addresses_of(host: str) -> set[str]:
    """IP addresses of a host name; empty if it is unknown here."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


class PlanOfNodes:
    """A plan covers one node and is the same on all: node 0 computes it."""

    def __init__(self, nodes: FleetNodes) -> None:
        self._nodes = nodes

    async def plan(self, *, gpu_bytes: int | None, host_bytes: int | None) -> coordinator_pb2.PlanResponse:
        request = coordinator_pb2.PlanRequest(gpu_bytes=gpu_bytes, host_bytes=host_bytes)
        stub: Any = CoordinatorServiceStub(self._nodes[0].coordinator)
        try:
            return await stub.Plan(request, timeout=_PLAN_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
