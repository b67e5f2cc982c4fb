"""The address by which a browser opens the page: one that the certificate names."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from pathlib import Path

from tasuki.rpc.served_certificate import read_certificate
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
        shown = read_certificate(cert, key).get("subjectAltName", ())
    except ssl.SSLError:
        return []
    names = [(str(kind), str(name)) for kind, name in shown if "*" not in str(name)]
    dns = [name for kind, name in names if kind == "DNS"]
    addresses = [ipaddress.ip_address(name.strip()) for kind, name in names if kind == "IP Address"]
    return [*dns, *(f"[{address}]" if address.version == 6 else str(address) for address in addresses)]
