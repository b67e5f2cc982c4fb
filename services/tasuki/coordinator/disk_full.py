"""Serves a coordinator whose journal cannot be opened: it reports DiskFull and retries until there is room."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NoReturn, TypeVar

from tasuki.config.places import node_targets
from tasuki.config.ports import port_targets
from tasuki.config.schema import NodeConfig
from tasuki.coordinator.encode import state_for
from tasuki.rpc.port import port_of
from tasuki.rpc.server import RpcServer
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1 import coordinator_pb2_grpc
from tasuki.wire.errors import DiskFull

_log = logging.getLogger("tasuki.coordinator")
_TRY_EVERY_S = 0.5
# Time for calls to finish at the stop; watchers never finish and are cut.
_GRACE_S = 0.5
_Opened = TypeVar("_Opened")


class DiskFullServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Reports the state, and refuses everything else with DiskFull. state: has no epoch, since only a journal assigns one."""

    def __init__(self, state: pb.NodeState, error: DiskFull, *, port_targets: Mapping[str, str]) -> None:
        self._state, self._error, self._port_targets = state, error, port_targets

    async def GetState(self, request: pb.GetStateRequest, context: Any) -> pb.GetStateResponse:
        return pb.GetStateResponse(state=state_for(context, self._state, port_targets=self._port_targets))

    async def WatchState(self, request: pb.WatchStateRequest, context: Any) -> AsyncIterator[pb.WatchStateResponse]:
        yield pb.WatchStateResponse(state=state_for(context, self._state, port_targets=self._port_targets))
        await asyncio.Event().wait()  # until the server stops

    async def Acquire(self, request: pb.AcquireRequest, context: Any) -> AsyncIterator[pb.AcquireResponse]:
        raise self._error
        yield pb.AcquireResponse()  # never sent; it makes this a stream

    async def RunStage(self, request: pb.RunStageRequest, context: Any) -> NoReturn:
        raise self._error

    async def ListChangeovers(self, request: pb.ListChangeoversRequest, context: Any) -> NoReturn:
        raise self._error

    async def Plan(self, request: pb.PlanRequest, context: Any) -> NoReturn:
        raise self._error


async def wait_for_disk(open_journal: Callable[[], _Opened], state: pb.NodeState, *, config: NodeConfig) -> _Opened | None:
    """Retries `open_journal` until it no longer raises DiskFull, and returns its result; meanwhile callers get the error.

    Returns None if the process is asked to stop first.
    """
    try:
        return open_journal()
    except DiskFull as error:
        failure = DiskFull(error.message, **error.metadata)  # the original would keep its traceback and frames alive
    _log.error("event=no_room error=%s", failure.message)
    state.last_error = f"{failure.reason}: {failure.message}"
    server = RpcServer(
        service="coordinator",
        target=node_targets(config)["coordinator"],
        port=port_of(config, "coordinator"),
        fleet=config.fleet,
    )
    servicer = DiskFullServicer(state, failure, port_targets=port_targets(config))
    server.add(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, servicer, "tasuki.v1.CoordinatorService")
    await server.start()
    stop = asyncio.Event()
    serving = asyncio.create_task(server.serve(stop))
    opened: _Opened | None = None
    while opened is None and not stop.is_set():
        await asyncio.wait([serving], timeout=_TRY_EVERY_S)
        try:
            opened = None if stop.is_set() else open_journal()
        except DiskFull:
            continue
    stop.set()
    await serving
    await server.stop(grace_s=_GRACE_S)
    return opened
