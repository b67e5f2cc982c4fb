"""Port of a service: address, certificate and access; and what a caller of such a port shows or sees."""

import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from tasuki.config.schema import NodeConfig, SecurityConfig
from tasuki.rpc.access import Access, access_of
from tasuki.wire.address import is_beyond_loopback, split_host_port
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


def port_at(config: NodeConfig, target: str, *, key: str) -> Port:
    """A port beside those of the three services, with the same security.

    key: of the address in the configuration. Raises InvalidArgument naming it, or a key of [security].
    """
    security = config.security
    if security.client_ca is None and security.callers is None and not security.insecure:
        raise InvalidArgument(
            key, f"= {target} needs security.client_ca or security.callers, or on loopback security.insecure = true"
        )
    if is_beyond_loopback(target) and security.cert is None:
        raise InvalidArgument(
            key, f"= {target} is not loopback: set security.cert and security.key (`tasuki certs` makes them)"
        )
    return Port(target=target, access=access_of(config), credentials=_server_credentials(config))


def fleet_port(config: NodeConfig) -> Port:
    """The fleet's port, on node 0. Raises as `port_at`."""
    assert config.fleet is not None
    leader = config.fleet.leader
    listen = f"0.0.0.0:{split_host_port(leader)[1]}" if is_beyond_loopback(leader) else leader
    port = port_at(config, listen, key="fleet.leader")
    num_ranks = config.fleet.num_nodes * config.trainer.num_ranks
    return replace(port, max_calls=port.max_calls + 2 * num_ranks)  # each rank waits for the others in one, its node in another


def check_ports(config: NodeConfig) -> None:
    """Raises as the start of a service would, for its port and the metrics', and for certificates that no port shows, as to a fleet."""
    for service in config.port_targets:
        port_of(config, service)
    if config.metrics.listen is not None and is_beyond_loopback(config.metrics.listen):
        port_at(config, config.metrics.listen, key="metrics.listen")
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
