"""Runs `tasuki dashboard` until Ctrl-C."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import sys
from pathlib import Path

from tasuki.config.load import load_config
from tasuki.config.schema import NodeConfig
from tasuki.dashboard.feed import Feed
from tasuki.dashboard.places import RunPlace, place_of, place_of_node
from tasuki.dashboard.server import DashboardServer, check_listen, make_token
from tasuki.rpc.port import read_certificate
from tasuki.wire.address import is_beyond_loopback, is_loopback, reachable, split_host_port
from tasuki.wire.errors import InvalidArgument

_NICE = 10
"""Lower priority than the services, which may need the processors."""


def run(folder: Path | None, *, config_path: Path | None, listen: str) -> int:
    """Serves the run of `folder`, or the node of `config_path`. Raises PathNotFound, InvalidArgument."""
    try:
        split_host_port(listen)
    except ValueError as error:
        raise InvalidArgument("listen", str(error)) from error
    config = None if config_path is None else load_config(config_path)
    check_listen(listen, config)
    server = make_server(folder, config=config, listen=listen)
    os.nice(_NICE)
    server.feed.start()
    try:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        server.serve_forever()
    finally:
        server.feed.close()
        server.server_close()
    return 0


def make_server(folder: Path | None, *, config: NodeConfig | None, listen: str) -> DashboardServer:
    """A server for a run's folder or a node, not yet started. Raises as `run`."""

    def place() -> RunPlace:
        if folder is not None:
            return place_of(folder)
        assert config is not None, "the command asks for one of both"
        return place_of_node(config.state_dir)

    is_beyond = is_beyond_loopback(listen)
    is_open = is_beyond or (config is not None and config.security.insecure)
    token = None if is_open else make_token()
    feed = Feed(place)
    try:
        server = DashboardServer(feed, listen, token=token, guard_config=config if is_beyond else None)
    except OSError as error:
        raise InvalidArgument("listen", f"{listen}: {error.strerror}; give another address by --listen") from error
    # The fragment after # is never sent or logged.
    server.url = f"{_origin(listen, config if is_beyond else None)}/{'' if token is None else f'#token={token}'}"
    return server


def _origin(listen: str, guard_config: NodeConfig | None) -> str:
    if guard_config is None:
        return f"http://{listen}"
    security = guard_config.security
    assert security.cert is not None and security.key is not None, "check_listen asks for them"
    return f"https://{open_address(listen, cert=security.cert, key=security.key)}"


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
