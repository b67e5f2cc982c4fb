"""Nodes that a starting node of a fleet is waiting for."""

from __future__ import annotations

import grpc

from tasuki.config.places import fleet_target
from tasuki.config.schema import NodeConfig
from tasuki.rpc.peer_credentials import peer_credentials
from tasuki.v1 import fleet_pb2
from tasuki.v1.fleet_pb2_grpc import FleetServiceStub
from tasuki.wire.channel import open_blocking_channel
from tasuki.wire.credentials import authorization

_TIMEOUT_S = 2.0


def missing_nodes(config: NodeConfig) -> str:
    """A line that names the nodes that have not joined; empty if all have."""
    fleet = config.fleet
    assert fleet is not None
    credentials = None if fleet.node_rank == 0 else peer_credentials(config.security)
    target = fleet_target(config) if fleet.node_rank == 0 else fleet.leader
    with open_blocking_channel(target, credentials=credentials) as channel:
        stub = FleetServiceStub(channel)
        try:
            seen = stub.GetFleet(fleet_pb2.GetFleetRequest(), timeout=_TIMEOUT_S, metadata=authorization(credentials))
        except grpc.RpcError:
            return f"waiting for node 0, which does not answer at {fleet.leader}"
    return line_of(seen)


def line_of(seen: fleet_pb2.GetFleetResponse) -> str:
    here = {member.node.node_rank for member in seen.members}
    missing = [str(rank) for rank in range(seen.num_nodes) if rank not in here]
    if not missing:
        return ""
    return f"waiting for node{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {seen.num_nodes} to join"
