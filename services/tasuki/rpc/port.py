"""Port of a service, of gRPC or HTTP: address, certificate and access; and what a caller of such a port shows or sees."""

import ipaddress
import logging
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc

from tasuki.config.schema import NodeConfig, SecurityConfig
from tasuki.rpc.access import Access, access_of
from tasuki.wire.address import is_beyond_loopback, is_loopback, split_host_port
from tasuki.wire.channel import MAX_PORT_CALLS
from tasuki.wire.credentials import Credentials, TlsFiles, TlsMaterial
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.reloaded import Reloaded

_SETTLE_S = 0.1
"""Far longer than a connection takes from the answer to its own copy of the certificate: microseconds."""


@dataclass(frozen=True, slots=True)
class Port:
    """Address where a service listens in addition to its unix socket."""

    target: str
    """E.g. "0.0.0.0:50051"."""
    access: Access
    credentials: grpc.ServerCredentials | None
    """None on loopback in plaintext."""
    max_calls: int = MAX_PORT_CALLS
    """Served at once: whoever has a role may begin messages and never end them."""


def port_of(config: NodeConfig, service: str) -> Port | None:
    """Port of a service; None if it has none. Raises InvalidArgument naming a key of [security] whose file cannot be used."""
    target = config.port_targets.get(service)
    if target is None:
        return None
    return Port(target=target, access=access_of(config), credentials=_server_credentials(config))


def fleet_port(config: NodeConfig) -> Port:
    """The fleet's port, on node 0. Raises InvalidArgument naming `fleet.leader`, or a key of [security]."""
    assert config.fleet is not None
    leader, security = config.fleet.leader, config.security
    listen = f"0.0.0.0:{split_host_port(leader)[1]}" if is_beyond_loopback(leader) else leader
    problem = ""
    if security.client_ca is None and security.callers is None and not security.insecure:
        problem = "needs security.client_ca or security.callers, or on loopback security.insecure = true"
    elif is_beyond_loopback(listen) and security.cert is None:
        problem = "is not loopback: set security.cert and security.key (`tasuki certs` makes them)"
    if problem:
        raise InvalidArgument("fleet.leader", f"= {listen} {problem}")
    # Each rank waits for the others in one call, its node in another.
    max_calls = MAX_PORT_CALLS + 2 * config.fleet.num_nodes * config.trainer.num_ranks
    return Port(listen, access_of(config), _server_credentials(config), max_calls=max_calls)


def check_ports(config: NodeConfig) -> None:
    """Raises as the start of a service would, for its port and the metrics', and for certificates that no port shows, as to a fleet."""
    metrics = config.metrics.listen
    if config.port_targets or (metrics is not None and is_beyond_loopback(metrics)):
        access_of(config)
    _server_credentials(config)


def check_files(config: NodeConfig, service: str) -> None:
    """Raises InvalidArgument naming a key of [security] if the service's port would not open for its file. Only reads files."""
    if service in config.port_targets or (service == "fleet" and config.fleet is not None):
        access_of(config)
        if config.security.cert is not None:
            server_files(config.security).read()


def _server_credentials(config: NodeConfig) -> grpc.ServerCredentials | None:
    """TLS credentials that read the certificate files at the start of each connection."""
    security = config.security
    if security.cert is None or security.key is None:
        return None
    files = server_files(security)
    material = Reloaded(files.paths, files.read)
    given = material.value

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """The certificate for a new connection; None if unchanged. It blocks other connections.

        A connection answered just before may still be loading the old certificate, which is freed once this call returns
        (grpc/grpc#36693). The pause lets that connection finish. Delete it when grpc holds a reference meanwhile.
        """
        nonlocal given
        newest = material.value
        if newest == given:
            return None
        time.sleep(_SETTLE_S)
        given = newest
        return _configuration(newest)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(given),
        changed,  # pyright: ignore[reportArgumentType]  the stub does not know None, for no change
        require_client_authentication=security.client_ca is not None,
    )


def server_files(security: SecurityConfig) -> TlsFiles:
    """Files of a port with TLS."""
    assert security.cert is not None and security.key is not None, "whoever opens the port asks for them"
    return TlsFiles(
        cert=("security.cert", security.cert),
        key=("security.key", security.key),
        ca=None if security.client_ca is None else ("security.client_ca", security.client_ca),
    )


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    assert material.cert is not None
    assert material.key is not None
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], root_certificates=material.ca)


def peer_credentials(security: SecurityConfig) -> Credentials | None:
    """The node's own certificate; None if ports on loopback admit every caller.

    `client_ca` has to have signed the nodes' certificates, too. Raises InvalidArgument for TLS or tokens without it.
    """
    if security.client_ca is not None:
        return Credentials(ca=security.client_ca, cert=security.cert, key=security.key)
    if security.cert is not None or security.callers is not None:
        raise InvalidArgument("security.client_ca", "is needed by a fleet: nodes show each other their certificates")
    return None


def read_certificate(cert: Path, key: Path) -> dict[str, Any]:
    """Fields as of `getpeercert`, seen by a client that trusts only this certificate. Names are not checked.

    Raises SSLError; SSLCertVerificationError if it has expired.
    """
    serving, asking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    serving.load_cert_chain(cert, key)
    asking.check_hostname = False
    asking.load_verify_locations(cert)
    asking.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    client = asking.wrap_bio(to_client, to_server)
    while True:
        try:
            client.do_handshake()
            return client.getpeercert() or {}
        except ssl.SSLWantReadError:
            with suppress(ssl.SSLWantReadError):
                server.do_handshake()


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
