"""A node that does not lead: on its socket it tells who is in the fleet, as the leader says."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from tasuki.config.schema import NodeConfig
from tasuki.rpc.server import RpcServer
from tasuki.v1 import fleet_pb2, fleet_pb2_grpc
from tasuki.wire.address import unix_target
from tasuki.wire.errors import from_rpc_error

_READ_TIMEOUT_S = 10.0


class RelayedFleet(fleet_pb2_grpc.FleetServiceServicer):
    """channel: to the leader."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Any = fleet_pb2_grpc.FleetServiceStub(channel)

    async def GetFleet(self, request: fleet_pb2.GetFleetRequest, context: Any) -> fleet_pb2.GetFleetResponse:
        try:
            return await self._stub.GetFleet(request, timeout=_READ_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


async def follow(config: NodeConfig, channel: grpc.aio.Channel, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, which SIGTERM does, too."""
    server = RpcServer(service="fleet", target=unix_target(config.state_dir, service="fleet"))
    server.add(fleet_pb2_grpc.add_FleetServiceServicer_to_server, RelayedFleet(channel), "tasuki.v1.FleetService")
    await server.start()
    await server.run(stop)
