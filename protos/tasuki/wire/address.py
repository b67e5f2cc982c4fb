"""Where a node's sockets are: both ends work it out from the state folder, so no one needs to be told."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
import stat
from contextlib import closing
from pathlib import Path

from tasuki.wire.errors import NodeRunning

MAX_PORT = 65535
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
# sockaddr_un holds 108 bytes; the longest name below the folder takes 40.
_MAX_SOCKET_DIR = 68
_PROBE_TIMEOUT_S = 1.0
_ANY_HOST = ("0.0.0.0", "::")  # noqa: S104 - recognized, not bound


def socket_folder(state_dir: Path) -> Path:
    """Folder of a node's sockets, whether it exists or not: below state_dir, or, when that path is too long for a unix socket, in
    /tmp under a name derived from it. It does not follow TMPDIR, which clients and services may have set differently.
    """
    place = state_dir.absolute() / "run"
    if len(os.fsencode(place)) <= _MAX_SOCKET_DIR:
        return place
    digest = hashlib.sha256(os.fsencode(state_dir.absolute())).hexdigest()[:16]
    return Path("/tmp") / f"tasuki-{os.getuid()}-{digest}"  # noqa: S108 - config.places makes it private and checks its owner


def unix_target(state_dir: Path, *, service: str) -> str:
    """gRPC target of a service that listens on its unix socket."""
    return f"unix:{socket_folder(state_dir) / service}.sock"


def split_host_port(target: str) -> tuple[str, int]:
    """Host, without brackets, and port of "HOST:PORT". Raises ValueError for anything else."""
    host, _, port = target.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (bare == host) is (":" in bare) or not (port.isascii() and port.isdecimal() and 0 < int(port) <= MAX_PORT):
        raise ValueError(f'must be a host and a port, such as "{LOOPBACK[0]}:50051" or "[::1]:50051"')
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Whether a host, without brackets, is this machine and nobody else can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_beyond_loopback(target: str) -> bool:
    """Whether calls to a gRPC target may leave the machine. Targets with a scheme other than "unix:" may."""
    if target.startswith("unix:"):
        return False
    try:
        return not is_loopback(split_host_port(target)[0])
    except ValueError:
        return True


def reachable(target: str, *, seen_from: str) -> str:
    """`target` for a client that reached the node at `seen_from`: one that listens on every address is reached at the same host."""
    if target.startswith("unix:") or split_host_port(target)[0] not in _ANY_HOST:
        return target
    host = LOOPBACK[0] if seen_from.startswith("unix:") else seen_from.rpartition(":")[0]
    return f"{host}:{split_host_port(target)[1]}"


def remove_dead_socket(path: Path) -> None:
    """Makes way where a server that was killed has left its socket.

    Raises NodeRunning when one answers there, or cannot be asked, and when something else is there than a socket.
    """
    try:
        is_socket = stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        if not path.is_symlink():  # whatever else keeps us from it, bind() says
            return
        is_socket = False
    if not is_socket:
        raise NodeRunning(f"{path} is in the way: it is no socket; remove it", address=path)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise NodeRunning(f"{path} is there and is no socket of a dead server: {error}", address=path) from error
    raise NodeRunning(f"another process serves {path}", address=path)


def local_address_towards(target: str) -> str:
    """Address of this machine's interface that leads to the host of "HOST:PORT". Nothing is sent. Raises OSError without a route."""
    host, port = split_host_port(target)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        name: str = probe.getsockname()[0]
        return name


def bind_once(host: str, port: int) -> None:
    """Takes the port and leaves it again. Raises OSError where nobody could serve there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
