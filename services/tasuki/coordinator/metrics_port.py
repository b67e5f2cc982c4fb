"""GET /metrics on the node's own address: plain on loopback, with the TLS and the callers of [security] elsewhere."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from tasuki.config.schema import NodeConfig
from tasuki.config.security_schema import SecurityConfig
from tasuki.rpc.access import Access, access_of
from tasuki.rpc.methods import METHODS
from tasuki.wire.address import is_beyond_loopback, split_host_port
from tasuki.wire.errors import PermissionDenied, TasukiError, Unauthenticated
from tasuki.wire.reloaded import Reloaded

_log = logging.getLogger("tasuki.coordinator")
_METHOD = METHODS["/tasuki.v1.MetricsService/GetMetrics"]
"""Whoever may call it may scrape."""
_ANSWER_TIMEOUT_S = 10.0
_IDLE_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 32
_RETRY_S = 5.0
Text = Callable[[], Awaitable[bytes]]


async def serve_metrics(config: NodeConfig, text: Text) -> None:
    """Serves until it is cancelled. An address that is in use is tried again, and costs the node nothing but its metrics."""
    assert config.metrics.listen is not None
    is_told = False
    while True:
        try:
            server = MetricsServer(config, config.metrics.listen, text, loop=asyncio.get_running_loop())
            break
        except (OSError, TasukiError) as error:
            if not is_told:
                _log.error("event=metrics_not_served listen=%s error=%s", config.metrics.listen, error)
            is_told = True
            await asyncio.sleep(_RETRY_S)
    thread = threading.Thread(target=server.serve_forever, name="tasuki-metrics", daemon=True)
    thread.start()
    _log.info("event=metrics_served listen=%s tls=%s", config.metrics.listen, server.tls is not None)
    try:
        await asyncio.Event().wait()
    finally:
        server.shutdown()
        server.server_close()


class MetricsServer(ThreadingHTTPServer):
    """One thread a connection, at most 32 of them; handshakes and slow readers hold up nobody else."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, config: NodeConfig, listen: str, text: Text, *, loop: asyncio.AbstractEventLoop) -> None:
        """Raises OSError when the address cannot be had, InvalidArgument naming a key of [security] whose file cannot be used."""
        host, port = split_host_port(listen)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.access: Access | None = None
        self.tls: Reloaded[ssl.SSLContext] | None = None
        if is_beyond_loopback(listen):
            self.access, self.tls = access_of(config), _tls_of(config.security)
        self._text, self._loop = text, loop
        self._room = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def text(self) -> bytes:
        """Of the event loop, from a connection's thread. Raises TimeoutError."""
        future = asyncio.run_coroutine_threadsafe(_awaited(self._text()), self._loop)
        try:
            return future.result(_ANSWER_TIMEOUT_S)
        except FutureTimeoutError:
            future.cancel()
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(_IDLE_TIMEOUT_S)
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        with self.tls.value.wrap_socket(request, server_side=True) as encrypted:
            super().finish_request(encrypted, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A stranger's failed handshake is no event of the node."""
        _log.debug("event=metrics_connection_failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _IDLE_TIMEOUT_S
    server_version, sys_version = "tasuki", ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, b"see /metrics\n")
            return
        server = self.server
        assert isinstance(server, MetricsServer)
        try:
            if server.access is not None:
                server.access.check(_METHOD, _HttpCaller(self))
            self._answer(HTTPStatus.OK, server.text(), content_type=CONTENT_TYPE_LATEST)
        except (Unauthenticated, PermissionDenied) as error:
            status = HTTPStatus.UNAUTHORIZED if isinstance(error, Unauthenticated) else HTTPStatus.FORBIDDEN
            self._answer(status, f"{error.message}\n".encode())
        except TimeoutError:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the coordinator is busy\n")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Nothing: scrapes would fill the log."""

    def _answer(self, status: HTTPStatus, body: bytes, *, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _HttpCaller:
    """A connection as `Access` sees a gRPC call."""

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(key.lower(), value) for key, value in self._handler.headers.items()]

    def auth_context(self) -> Mapping[str, list[bytes]]:
        connection = self._handler.connection
        return _names_of(connection.getpeercert() or {}) if isinstance(connection, ssl.SSLSocket) else {}


def _names_of(certificate: Mapping[str, Any]) -> dict[str, list[bytes]]:
    """SPIFFE id and common name, as grpc names them. A certificate with several ids has none, as with grpc."""
    ids = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI" and value.startswith("spiffe://")]
    names = [value for group in certificate.get("subject", ()) for kind, value in group if kind == "commonName"]
    return {
        "peer_spiffe_id": [ids[0].encode()] if len(ids) == 1 else [],
        "x509_common_name": [name.encode() for name in names],
    }


def _tls_of(security: SecurityConfig) -> Reloaded[ssl.SSLContext]:
    assert security.cert is not None and security.key is not None, "check_constraints asks for them"
    cert, key, client_ca = security.cert, security.key, security.client_ca

    def read() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    return Reloaded([path for path in (cert, key, client_ca) if path is not None], read)


async def _awaited(work: Awaitable[bytes]) -> bytes:
    return await work
