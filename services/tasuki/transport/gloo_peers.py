"""Whose processes this one's gloo groups are connected to.

Gloo asks its peers for no secret. A rank listens on a port and takes whoever connects first, with a small number that is easy to guess, for
the peer that it waits for. Torch and SGLang pass pickles over such connections: a process of another user that is faster than the true
peer could have this one run its code. The kernel knows the user at the other end of a loopback connection, so we look before first use.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroupGloo

from tasuki.wire.errors import PeerUnavailable

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"
_NUM_LOOKS = 5
"""The kernel's table is no snapshot: while others connect, a row may be missed."""


def check_gloo_peers() -> None:
    """Has every gloo group that this process makes from now on refuse peers of another user, before anything is received. Idempotent.

    Making a group then raises PeerUnavailable. For ranks on one machine that talk over the loopback interface (GLOO_SOCKET_IFNAME=lo).
    """
    if not hasattr(ProcessGroupGloo.__init__, "__wrapped__"):
        # There is no hook: torch and SGLang make their groups from this class, whose constructor returns once all peers are connected.
        ProcessGroupGloo.__init__ = _checked(ProcessGroupGloo.__init__)


def _checked(connect: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(connect)
    def connect_and_check(group: ProcessGroupGloo, *args: Any, **kwargs: Any) -> None:
        before = _sockets()
        connect(group, *args, **kwargs)
        check_peers(_sockets() - before, num_peers=group.size() - 1)

    return connect_and_check


def check_peers(sockets: set[int], *, num_peers: int) -> None:
    """Raises PeerUnavailable when a connection's other end is not a process of this user, or there are fewer than `num_peers`.

    sockets: inodes; those that are no established TCP connection are passed over.
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
            who = "another machine" if uid is None else f"user {uid}"
            raise PeerUnavailable(
                f"a process of {who} is connected to a gloo port of this rank, maybe in the place of another rank"
            )


def _peers(sockets: set[int]) -> list[int | None]:
    """The user at the other end of each connection; None when that is not on this machine."""
    lines = [line for table in _TABLES if table.exists() for line in table.read_text().splitlines()[1:]]
    # Number, local and remote address, state, two queues, timer, retransmits, user, time-out, inode.
    rows = [row for row in map(str.split, lines) if row[3] == _ESTABLISHED]
    user_of = {(row[1], row[2]): int(row[7]) for row in rows}
    return [user_of.get((row[2], row[1])) for row in rows if int(row[9]) in sockets]


def _sockets() -> set[int]:
    """Inodes of the sockets that this process has open."""
    inodes: set[int] = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the descriptor of the listing, or one that another thread has closed
            continue
        if target.startswith("socket:["):
            inodes.add(int(target[len("socket:[") : -1]))
    return inodes
