"""Checks which processes this one's gloo groups are connected to.

Gloo does not authenticate peers. A rank listens on a port and accepts whoever connects first with a small, guessable number. Torch and
SGLang send pickles over such connections, so a faster process of another user could run code here. The kernel knows the user at the
other end of a loopback connection, which is checked before first use. A group that is connected needs no further connections: its port
then drops them, since gloo would keep each one until the process has no descriptors left, and abort.
"""

import functools
import logging
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroupGloo, Store

from tasuki.wire.errors import PeerUnavailable

_log = logging.getLogger(__name__)
_gloo: Any = ProcessGroupGloo
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"
_TCP_MD5SIG_EXT, _ANY_PEER, _KEY_BYTES = 32, 0x01, 16
_NUM_LOOKS = 5
"""The kernel's table is not a snapshot: a row may be missed while others connect."""


def check_gloo_peers() -> None:
    """Makes every gloo group created from now on refuse peers of other users before receiving anything. Idempotent.

    Creating a group then raises PeerUnavailable. A connected group takes no further connections. For ranks on one machine that use the
    loopback interface (GLOO_SOCKET_IFNAME=lo).
    """
    if not hasattr(ProcessGroupGloo.__init__, "__wrapped__"):
        # There is no hook: torch and SGLang create groups from this class, whose constructor returns once all peers are connected.
        ProcessGroupGloo.__init__ = _checked(ProcessGroupGloo.__init__)


_CONNECT = ProcessGroupGloo.__init__


def connect_over_nodes(store: Store, rank: int, size: int, *, device: Any, timeout: timedelta) -> ProcessGroupGloo:
    """Connects a gloo group over several machines, whose peers there are not checked. Traffic is neither encrypted nor signed.

    Raises PeerUnavailable for a peer of another user on this machine.
    """
    options: Any = _gloo._Options()
    options._devices, options._timeout = [device], timeout
    group = ProcessGroupGloo.__new__(ProcessGroupGloo)
    before = _sockets()
    _CONNECT(group, store, rank, size, options)
    for uid in _peers(_sockets() - before):
        if uid not in (None, os.geteuid()):
            raise _stranger(f"user {uid}")
    return group


def _checked(connect: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(connect)
    def connect_and_check(group: ProcessGroupGloo, *args: Any, **kwargs: Any) -> None:
        before = _sockets()
        connect(group, *args, **kwargs)
        check_peers(_sockets() - before, num_peers=group.size() - 1)
        close_listeners(besides=before)

    return connect_and_check


def close_listeners(*, besides: set[int]) -> None:
    """Drops all packets to this process's listening TCP sockets, except sockets `besides`, by inode. Connections that exist go on.

    By signatures that nobody can make, since gloo aborts when its listening socket is closed or fails.
    """
    for descriptor, inode in _descriptors().items():
        if inode not in besides:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:  # not a socket of TCP, or already closed
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and one.family in (socket.AF_INET, socket.AF_INET6):
                    _require_signatures(one)


def _require_signatures(listener: socket.socket) -> None:
    """Sets a random MD5 key for peers of every address, so that segments without it are dropped. Existing connections have no key.

    Source: RFC 2385; struct tcp_md5sig of linux/tcp.h, whose address is a sockaddr_storage.
    """
    key = os.urandom(_KEY_BYTES)
    is_ipv6 = listener.family == socket.AF_INET6
    any_address = (bytes(16), socket.inet_pton(socket.AF_INET6, "::ffff:0:0")) if is_ipv6 else (bytes(4),)
    for address in any_address:
        # A sockaddr: family, port, and for IPv6 flow information before the address.
        peer = struct.pack("=H6x" if is_ipv6 else "=H2x", listener.family) + address
        signature = struct.pack("=128sBBHi80s", peer, _ANY_PEER, 0, len(key), 0, key)
        try:
            listener.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, signature)
        except OSError as error:  # a kernel without TCP_MD5SIG
            _log.warning("event=gloo_port_open port=%d error=%s", listener.getsockname()[1], error)


def check_peers(sockets: set[int], *, num_peers: int) -> None:
    """Raises PeerUnavailable if a peer is not a process of this user or there are fewer than `num_peers`.

    sockets: inodes; ignores those that are not established TCP connections.
    """
    peers = _peers(sockets)
    for _ in range(_NUM_LOOKS - 1):
        if len(peers) >= num_peers and None not in peers:
            break
        peers = _peers(sockets)
    if len(peers) < num_peers:
        raise PeerUnavailable(f"{len(peers)} of {num_peers} gloo peers are connected")
    for uid in peers:
        if uid != os.geteuid():
            raise _stranger("another machine" if uid is None else f"user {uid}")


def _stranger(who: str) -> PeerUnavailable:
    return PeerUnavailable(f"a process of {who} is connected to a gloo port of this rank, possibly in place of another rank")


def _peers(sockets: set[int]) -> list[int | None]:
    """User at the other end of each connection; None if it is not on this machine."""
    # Rows of the kernel's tables: number, local and remote address, state, two queues, timer, retransmits, user, timeout, inode.
    lines = [line for table in _TABLES if table.exists() for line in table.read_text().splitlines()[1:]]
    rows = [row for row in map(str.split, lines) if row[3] == _ESTABLISHED]
    user_of = {(row[1], row[2]): int(row[7]) for row in rows}
    return [user_of.get((row[2], row[1])) for row in rows if int(row[9]) in sockets]


def _sockets() -> set[int]:
    """Inodes of this process's open sockets."""
    return set(_descriptors().values())


def _descriptors() -> dict[int, int]:
    """Inode of every open socket of this process, by descriptor."""
    found: dict[int, int] = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the directory's own descriptor, or one closed by another thread
            continue
        if target.startswith("socket:["):
            found[int(entry)] = int(target[len("socket:[") : -1])
    return found
