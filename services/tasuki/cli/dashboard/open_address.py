"""The address by which a browser opens the page: one that the certificate names."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from contextlib import suppress
from pathlib import Path

from tasuki.wire.address import is_loopback, reachable


def open_address(listen: str, *, cert: Path, key: Path) -> str:
    """HOST:PORT of a page beyond loopback. A wildcard becomes a host that the certificate names; without one it stays."""
    host = _best(_hosts_of(cert, key), own=socket.gethostname())
    return listen if host is None else reachable(listen, seen_from=f"{host}:0")


def _best(hosts: list[str], *, own: str) -> str | None:
    """This machine's name, else another that other machines can use, else the first."""
    if own in hosts:
        return own
    return next((host for host in hosts if not is_loopback(host.strip("[]"))), next(iter(hosts), None))


def _hosts_of(cert: Path, key: Path) -> list[str]:
    """Names and addresses of the certificate that a URL can have, in its order; empty if it has expired."""
    try:
        shown = _shown_by(cert, key).get("subjectAltName", ())
    except ssl.SSLError:
        return []
    names = [(str(kind), str(name)) for kind, name in shown if "*" not in str(name)]
    dns = [name for kind, name in names if kind == "DNS"]
    addresses = [ipaddress.ip_address(name.strip()) for kind, name in names if kind == "IP Address"]
    return [*dns, *(f"[{address}]" if address.version == 6 else str(address) for address in addresses)]


def _shown_by(cert: Path, key: Path) -> ssl._PeerCertRetDictType:
    """Reads the certificate as a client that trusts only it. Raises SSLError."""
    serving, asking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    serving.load_cert_chain(cert, key)
    asking.check_hostname = False  # the names are what is asked for
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
