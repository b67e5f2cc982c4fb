"""An HTTP server beside a node: beyond loopback the TLS and the callers of [security]."""

import ipaddress
import logging
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

from tasuki.config.schema import NodeConfig, SecurityConfig
from tasuki.rpc.access import Access, access_of
from tasuki.rpc.port import server_files
from tasuki.wire.address import is_loopback, split_host_port
from tasuki.wire.reloaded import Reloaded

_log = logging.getLogger("tasuki.rpc")
IDLE_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 32
_MAX_ID_CHARS = 2048


class HttpPort(ThreadingHTTPServer):
    """One thread a connection, each with one request; connections above 32 are closed."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, listen: str, handler: type[BaseHTTPRequestHandler], *, guard: NodeConfig | None) -> None:
        """guard: whose [security] has the certificate and the callers; None serves plain text to everybody.

        Raises OSError when the address cannot be had, InvalidArgument naming a key of [security] whose file cannot be used.
        """
        host, port = split_host_port(listen)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.access: Access | None = None
        self.tls: Reloaded[ssl.SSLContext] | None = None
        if guard is not None:
            self.access, self.tls = access_of(guard), _tls_of(guard.security)
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), handler)

    def takes_host(self, header: str | None) -> bool:
        """Whether the `Host` header may name this server. Refuses pages elsewhere whose name resolves to it (DNS rebinding).

        Over TLS the certificate determines the name. The port may differ, as through a tunnel.
        """
        if self.tls is not None or header is None:
            return self.tls is not None
        host, _, port = header.rpartition(":") if not header.endswith("]") else (header, "", "")
        name = host if host and port.isdecimal() else header
        bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
        with suppress(ValueError):
            bare = str(ipaddress.ip_address(bare))
        return is_loopback(bare.lower())

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
        request.settimeout(IDLE_TIMEOUT_S)
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        with self.tls.value.wrap_socket(request, server_side=True) as encrypted:
            super().finish_request(encrypted, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A stranger's failed handshake is no event of the node."""
        _log.debug("event=http_connection_failed", exc_info=True)


class HttpHandler(BaseHTTPRequestHandler, ABC):
    """Answers the one request of a connection to an `HttpPort`. headers_of_all: of every answer."""

    server_version, sys_version = "tasuki", ""
    headers_of_all: Mapping[str, str] = MappingProxyType({})

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, HttpPort)
        if server.takes_host(self.headers.get("Host")):
            self.reply()
        else:
            self.answer(HTTPStatus.MISDIRECTED_REQUEST, b"this server is for names of this machine\n")

    def do_HEAD(self) -> None:
        """Answers as GET, without the body."""
        self.do_GET()

    @abstractmethod
    def reply(self) -> None:
        """Answers a request for a name of this server."""

    def answer(self, status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        headers = {**self.headers_of_all, "Content-Type": content_type, "Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Logs nothing: requests would fill the log."""


class HttpCaller:
    """A connection as `Access` sees a gRPC call."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._handler = handler

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(key.lower(), value) for key, value in self._handler.headers.items()]

    def auth_context(self) -> Mapping[str, list[bytes]]:
        connection = self._handler.connection
        return _names_of(connection.getpeercert() or {}) if isinstance(connection, ssl.SSLSocket) else {}


def _names_of(certificate: Mapping[str, Any]) -> dict[str, list[bytes]]:
    """SPIFFE id and common name, as grpc names them: no id if it is not the certificate's only URI, or longer than an id may be."""
    uris = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
    ids = [uri for uri in uris if uri.startswith("spiffe://") and len(uri) <= _MAX_ID_CHARS]
    names = [value for group in certificate.get("subject", ()) for kind, value in group if kind == "commonName"]
    return {
        "peer_spiffe_id": [ids[0].encode()] if ids and len(uris) == 1 else [],
        "x509_common_name": [name.encode() for name in names],
    }


def _tls_of(security: SecurityConfig) -> Reloaded[ssl.SSLContext]:
    files = server_files(security)

    def read() -> ssl.SSLContext:
        ca = files.read().ca  # refuses what a gRPC port refuses, such as a key that every user can read
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        assert files.cert is not None and files.key is not None
        context.load_cert_chain(files.cert[1], files.key[1])
        if ca is not None:
            context.load_verify_locations(cadata=ca.decode("ascii", errors="ignore"))  # as checked by files.read
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    return Reloaded(files.paths, read)
