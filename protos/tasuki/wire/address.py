"""Addresses of a node's sockets. Clients and services derive them from the state folder."""

import fcntl
import hashlib
import ipaddress
import os
import socket
import stat
import struct
from contextlib import closing, suppress
from pathlib import Path

from tasuki.wire.errors import NodeRunning

MAX_PORT = 65535
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
# sockaddr_un holds 108 bytes; the longest name below the folder takes 40.
_MAX_SOCKET_DIR = 68
_PROBE_TIMEOUT_S = 1.0
_SIOCGIFADDR = 0x8915
"""Linux's ioctl for the IPv4 address of an interface."""
_ANY_HOST = ("0.0.0.0", "::")  # noqa: S104 - recognized, not bound


def socket_folder(state_dir: Path) -> Path:
    """Folder of a node's sockets, which need not exist. It is below state_dir or, if that path is too long for a unix socket, in /tmp
    under a name derived from it. TMPDIR is ignored, since clients and services may set it differently.
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
    """Splits "HOST:PORT" into the host, without brackets, and the port. Raises ValueError for anything else."""
    host, _, port = target.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (bare == host) is (":" in bare) or not (port.isascii() and port.isdecimal() and 0 < int(port) <= MAX_PORT):
        examples = f'such as "{LOOPBACK[0]}:50051" or "[::1]:50051"'
        raise ValueError(f"must be HOST:PORT with a port from 1 to {MAX_PORT}, {examples}")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Whether a host, without brackets, can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_beyond_loopback(target: str) -> bool:
    """Whether calls to a gRPC target may leave the machine. True for every scheme other than "unix:"."""
    if target.startswith("unix:"):
        return False
    try:
        return not is_loopback(split_host_port(target)[0])
    except ValueError:
        return True


def is_same_port(target: str, other: str) -> bool:
    """Whether two servers of one machine could not both listen at these addresses: on one port, and one host or any host."""
    (host, port), (other_host, other_port) = split_host_port(target), split_host_port(other)
    hosts = {LOOPBACK[0] if one == LOOPBACK[1] else one for one in (host, other_host)}
    return port == other_port and (len(hosts) == 1 or not hosts.isdisjoint(_ANY_HOST))


def reachable(target: str, *, seen_from: str) -> str:
    """`target` as seen by a client that reached the node at `seen_from`: a wildcard address becomes that host."""
    if target.startswith("unix:") or split_host_port(target)[0] not in _ANY_HOST:
        return target
    host = LOOPBACK[0] if seen_from.startswith("unix:") else seen_from.rpartition(":")[0]
    return f"{host}:{split_host_port(target)[1]}"


def remove_dead_socket(path: Path) -> None:
    """Removes the socket that a killed server left behind.

    Raises NodeRunning if a server answers or cannot be asked, and if the path is not a socket.
    """
    try:
        is_socket = stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        if not path.is_symlink():  # any other problem is reported by bind()
            return
        is_socket = False
    if not is_socket:
        raise NodeRunning(f"{path} is not a socket; remove it", address=path)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise NodeRunning(f"{path} exists and may belong to a live server: {error}", address=path) from error
    raise NodeRunning(f"another process serves {path}", address=path)


def local_address_towards(target: str) -> str:
    """Address of the local interface that routes to the host of "HOST:PORT". Sends nothing. Raises OSError without a route."""
    host, port = split_host_port(target)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        name: str = probe.getsockname()[0]
        return name


def interfaces_with_address() -> list[str]:
    """Names of this machine's network interfaces that have an IPv4 or IPv6 address."""
    inet6 = Path("/proc/net/if_inet6")
    found = {line.split()[-1] for line in inet6.read_text().splitlines()} if inet6.exists() else set[str]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.add(name)
    return sorted(found)


def bind_once(host: str, port: int) -> None:
    """Binds the port and releases it. Raises OSError if it cannot be served."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
