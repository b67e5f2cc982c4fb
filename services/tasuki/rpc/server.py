"""One service's gRPC servers, on its unix socket and its port: interceptors, health, reflection, metrics, graceful stop."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2
from grpc._cython import cygrpc as _cygrpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from tasuki.config.schema import FleetConfig
from tasuki.rpc.access import FleetFence
from tasuki.rpc.interceptors import CallInterceptor
from tasuki.rpc.logs import RateLimitedLog
from tasuki.rpc.metrics import CallMetrics, MetricsServicer, SpanCounts
from tasuki.rpc.port import Port
from tasuki.v1 import metrics_pb2
from tasuki.v1.metrics_pb2_grpc import add_MetricsServiceServicer_to_server
from tasuki.wire.address import is_beyond_loopback, remove_dead_socket
from tasuki.wire.channel import PORT_OPTIONS, SERVER_OPTIONS
from tasuki.wire.errors import InvalidArgument, NodeRunning, ServiceFailed
from tasuki.wire.tracing import NO_TRACER, Tracer

_log = logging.getLogger("tasuki.rpc")
_LOOK_EVERY_S = 1.0


class RpcServer:
    """Serves one service process on a unix socket, and on a port where it has one.

    target: "unix:/path". registry: of the service's metrics, which MetricsService tells.
    """

    def __init__(
        self,
        *,
        service: str,
        target: str,
        port: Port | None = None,
        fleet: FleetConfig | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """fleet: the only one that may command the service. tracer: of its calls."""
        self.service, self.target = service, target
        self._path = Path(target.removeprefix("unix:"))
        self._port = port
        self.registry = CollectorRegistry()
        self._metrics = CallMetrics(self.registry)
        self.metrics = MetricsServicer(self.registry)
        if tracer is not NO_TRACER:
            self.registry.register(SpanCounts(tracer))
        intercept = partial(CallInterceptor, self._metrics, FleetFence(fleet), tracer=tracer, refusals=RateLimitedLog())
        self._local = grpc.aio.server(interceptors=(intercept(),), options=SERVER_OPTIONS)
        self._servers = [self._local]
        if port is not None:
            interceptors = (intercept(access=port.access),)
            self._servers.append(
                grpc.aio.server(interceptors=interceptors, options=PORT_OPTIONS, maximum_concurrent_rpcs=port.max_calls)
            )
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]  untyped library
        self._names: list[str] = []
        self._socket_inode: int | None = None
        self.add(add_MetricsServiceServicer_to_server, self.metrics, "tasuki.v1.MetricsService")

    def add(self, add_to_server: Callable[[Any, grpc.aio.Server], None], servicer: object, name: str) -> None:
        """Adds a servicer; `name` is the service's full name, e.g. "tasuki.v1.RolloutService"."""
        for server in self._servers:
            add_to_server(servicer, server)
        self._metrics.preset(name)
        self._names.append(name)

    async def start(self) -> None:
        """Binds and serves. Every added service is SERVING from here on.

        Raises NodeRunning when an address is in use, InvalidArgument for a port beyond loopback without TLS.
        """
        for server in self._servers:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
            # For grpcurl and its like.
            reflected = _ReflectionServicer(service_names=(*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME))
            reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, server)
        self._bind_socket()
        if self._port is not None:
            self._bind_port(self._port)
        for server in self._servers:
            await server.start()
        for name in self._names:
            await self.set_serving(name, True)
        port = "-" if self._port is None else self._port.target
        _log.info("event=serving service=%s target=%s port=%s pid=%d", self.service, self.target, port, os.getpid())

    async def set_serving(self, name: str, is_serving: bool) -> None:
        """Sets an entry of the health map, e.g. "tasuki.v1.RolloutService/Generate"."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)

    async def run(self, stop_event: asyncio.Event, *, grace_s: float = 5.0) -> None:
        """Serves until `stop_event`, SIGTERM or SIGINT, then stops gracefully. Raises as `serve`."""
        try:
            await self.serve(stop_event)
        finally:
            await self.stop(grace_s=grace_s)

    async def serve(self, stop_event: asyncio.Event) -> None:
        """Returns when `stop_event` is set, which SIGTERM and SIGINT do, too.

        Raises ServiceFailed, with the event set, when grpcio has ended a server. The process's memory is not to be trusted then, so a
        new process has to serve.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop_event.set)
        stopped = asyncio.create_task(stop_event.wait())
        ended = [asyncio.create_task(_until_ended(each)) for each in self._servers]
        try:
            await asyncio.wait([stopped, *ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stopped, *ended):
                task.cancel()
        cause = next((each.exception() for each in ended if each.done()), None)
        if cause is not None:
            _log.error("event=server_ended service=%s error=%r", self.service, cause)
            stop_event.set()
            raise ServiceFailed(f"{self.service} serves no more: {cause!r}", service=self.service)

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """Tells watchers NOT_SERVING, lets running calls end for `grace_s` seconds, cancels the rest, and removes our socket."""
        await self._health.enter_graceful_shutdown()
        # A server that grpcio has ended raises its error here again.
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers), return_exceptions=True)
        if self._socket_inode is not None and self._path.exists() and self._path.stat().st_ino == self._socket_inode:
            self._path.unlink()
        _log.info("event=stopped service=%s", self.service)

    def _bind_socket(self) -> None:
        remove_dead_socket(self._path)  # grpcio would silently take over one that another server still uses
        # grpcio makes the socket with the process's umask; there is no other way to have it 0600 from its first moment.
        umask = os.umask(0o177)
        try:
            self._local.add_insecure_port(self.target)
        except RuntimeError as error:
            raise self._in_use(self.target) from error
        finally:
            os.umask(umask)
        self._socket_inode = self._path.stat().st_ino

    def _bind_port(self, port: Port) -> None:
        if port.credentials is None and is_beyond_loopback(port.target):
            raise InvalidArgument("listen", f"= {port.target} is not loopback; without TLS only loopback is served")
        try:
            if port.credentials is None:
                self._servers[-1].add_insecure_port(port.target)
            else:
                self._servers[-1].add_secure_port(port.target, port.credentials)
        except RuntimeError as error:
            raise self._in_use(port.target) from error

    def _in_use(self, address: str) -> NodeRunning:
        return NodeRunning(f"{self.service} cannot serve on {address}: the address is in use", address=address)


async def _until_ended(server: grpc.aio.Server) -> None:
    """Returns once `server` was stopped; raises what has ended it. Asked once, grpcio would tell of a failure after the last call."""
    while await server.wait_for_termination(_LOOK_EVERY_S):
        pass


cygrpc: Any = _cygrpc  # its stub knows a part of it


class _RegisteredMethods(cygrpc.AioServer):
    """Refuses calls of unregistered methods before grpcio decodes their paths.

    A path that is not UTF-8 raises in the loop that serves all calls of grpcio's server and ends it; only paths of unregistered methods
    can be such. Delete this when grpcio fails the one call alone. A grpcio without this hook ends on such a path, and the service with it.
    """

    async def _request_call(self) -> Any:
        """Answers calls of unregistered methods. Never returns one."""
        answers = set[asyncio.Task[None]]()
        while True:
            call = await super()._request_call()
            answer = asyncio.create_task(_refuse(call))
            answers.add(answer)
            answer.add_done_callback(answers.discard)


async def _refuse(call: Any) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with suppress(grpc.aio.AbortError, grpc.aio.BaseError):  # told, or the caller is gone
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this service has no such method")


cygrpc.AioServer = _RegisteredMethods  # for every server that this process makes


@cache
def _comments() -> dict[str, bytes]:
    """Comments of our .proto files, which generated code lacks: by name, what to append to the serialized descriptor."""
    made = (Path(metrics_pb2.__file__).parent / "comments.binpb").read_bytes()
    return {file.name: file.SerializeToString() for file in descriptor_pb2.FileDescriptorSet.FromString(made).file}


class _ReflectionServicer(reflection.aio.ReflectionServicer):  # pyright: ignore[reportAttributeAccessIssue]  untyped library
    """Adds comments, and single methods, such as "tasuki.v1.RolloutService.Generate", which protobuf's symbol pool lacks."""

    def _file_by_filename(self, request: Any, filename: str) -> Any:
        return _commented(super()._file_by_filename(request, filename))

    def _file_containing_symbol(self, request: Any, symbol: str) -> Any:
        answer = super()._file_containing_symbol(request, symbol)
        service, _, _ = symbol.rpartition(".")
        if answer.HasField("error_response") and service in self._service_names:
            answer = super()._file_containing_symbol(request, service)
        return _commented(answer)


def _commented(answer: Any) -> Any:
    if answer.HasField("file_descriptor_response"):
        files = answer.file_descriptor_response.file_descriptor_proto
        files[:] = [one + _comments().get(descriptor_pb2.FileDescriptorProto.FromString(one).name, b"") for one in files]
    return answer
