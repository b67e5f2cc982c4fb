"""One gRPC server: interceptors, health, reflection, metrics, address rules, graceful stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, start_http_server

from tasuki.config.schema import LOOPBACK
from tasuki.rpc.interceptors import CallInterceptor
from tasuki.rpc.metrics import CallMetrics
from tasuki.rpc.reflection import enable_reflection
from tasuki.wire.address import remove_dead_socket
from tasuki.wire.channel import SERVER_OPTIONS
from tasuki.wire.errors import InvalidArgument, NodeRunning

_log = logging.getLogger("tasuki.rpc")


class RpcServer:
    """Serves one service process on a unix socket, or on loopback TCP.

    target: "unix:/path" or "127.0.0.1:PORT". metrics_port: loopback port of Prometheus' /metrics; none by default.
    """

    def __init__(self, *, service: str, target: str, metrics_port: int | None = None) -> None:
        self.service, self.target = service, target
        self._metrics_port = metrics_port
        self._registry = CollectorRegistry()
        self._metrics = CallMetrics(self._registry)
        self._server = grpc.aio.server(interceptors=[CallInterceptor(self._metrics)], options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]  untyped library
        self._names: list[str] = []
        self._socket_inode: int | None = None
        self._stop_metrics: Callable[[], None] | None = None

    def add(self, add_to_server: Callable[[Any, grpc.aio.Server], None], servicer: object, name: str) -> None:
        """Adds a servicer; `name` is the service's full name, e.g. "tasuki.v1.RolloutService"."""
        add_to_server(servicer, self._server)
        self._metrics.preset(name)
        self._names.append(name)

    async def start(self) -> None:
        """Binds and serves. Every added service is SERVING from here on.

        Raises NodeRunning when the address is in use, InvalidArgument for an address that is not loopback.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        enable_reflection(self._server, service_names=(*self._names, health.SERVICE_NAME))
        self._bind()
        await self._server.start()
        for name in self._names:
            await self.set_serving(name, True)
        if self._metrics_port is not None:
            self._serve_metrics(self._metrics_port)
        _log.info("event=serving service=%s target=%s pid=%d", self.service, self.target, os.getpid())

    async def set_serving(self, name: str, is_serving: bool) -> None:
        """Sets an entry of the health map, e.g. "tasuki.v1.RolloutService/Generate"."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)

    async def run(self, stop_event: asyncio.Event, *, grace_s: float = 5.0) -> None:
        """Serves until `stop_event`, SIGTERM or SIGINT, then stops gracefully."""
        await self.serve(stop_event)
        await self.stop(grace_s=grace_s)

    async def serve(self, stop_event: asyncio.Event) -> None:
        """Returns when `stop_event` is set, which SIGTERM and SIGINT do, too."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop_event.set)
        await stop_event.wait()

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """Tells watchers NOT_SERVING, lets running calls end for `grace_s` seconds, cancels the rest, and removes our socket."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        path = self._socket_path()
        if path is not None and self._socket_inode is not None and path.exists() and path.stat().st_ino == self._socket_inode:
            path.unlink()
        if self._stop_metrics is not None:
            self._stop_metrics()
        _log.info("event=stopped service=%s", self.service)

    def _bind(self) -> None:
        path = self._socket_path()
        if path is None:
            host = self.target.rpartition(":")[0]
            if host not in LOOPBACK:
                raise InvalidArgument(
                    "listen", f"{self.target} is not loopback; without TLS only {', '.join(LOOPBACK)} may be served"
                )
        else:
            remove_dead_socket(path)  # grpcio would take over one that another server still uses, without a word
        # grpcio makes the socket with the process's umask; there is no other way to have it 0600 from its first moment.
        umask = os.umask(0o177)
        try:
            self._server.add_insecure_port(self.target)
        except RuntimeError as error:
            raise NodeRunning(
                f"{self.service} cannot serve on {self.target}: the address is in use", address=self.target
            ) from error
        finally:
            os.umask(umask)
        if path is not None:
            self._socket_inode = path.stat().st_ino

    def _serve_metrics(self, port: int) -> None:
        try:
            http_server, _ = start_http_server(port, addr="127.0.0.1", registry=self._registry)
        except OSError as error:
            raise NodeRunning(f"metrics_port {port} of {self.service} is in use", address=f"127.0.0.1:{port}") from error
        self._stop_metrics = http_server.shutdown

    def _socket_path(self) -> Path | None:
        return Path(self.target.removeprefix("unix:")) if self.target.startswith("unix:") else None
