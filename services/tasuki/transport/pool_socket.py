"""Lets a process join its node's pool: receives the keeper's descriptors over a 0600 unix socket and imports each once."""

from __future__ import annotations

import logging
import os
import socket
import struct
from pathlib import Path

from tasuki.memory.pool import Identity, PoolKeeper, open_pool
from tasuki.transport.fd_socket import MAX_ALL_FDS, allow_descriptors, fetch_all, listen, peer_ids, send_all
from tasuki.wire.errors import BadHandle, TasukiError

_IDENTITY = struct.Struct("<QQ")
_SEND_TIMEOUT_S = 1.0
_log = logging.getLogger(__name__)


class PoolServer:
    """Shares a pool's descriptors with processes of this user, and reclaims chunks of dead ones, at each `poll`; uses no thread."""

    def __init__(self, keeper: PoolKeeper, path: Path) -> None:
        """Raises NodeRunning if something answers on the socket; replaces a leftover file."""
        self._keeper, self._path = keeper, path
        self._listener = listen(path)
        self._listener.setblocking(False)

    def poll(self) -> None:
        """Serves peers that have connected since the last call."""
        while True:
            try:
                peer, _ = self._listener.accept()
            except BlockingIOError:
                break
            with peer:
                self._hand_out(peer)
        if num_freed := self._keeper.reclaim():
            _log.warning(
                "event=reclaimed device=%s chunks=%d free=%d", self._keeper.device, num_freed, self._keeper.usage().num_free
            )

    def close(self) -> None:
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _hand_out(self, peer: socket.socket) -> None:
        pid, uid = peer_ids(peer)
        if uid != os.getuid():
            _log.warning("event=pool_refused peer_uid=%d", uid)
            return
        try:
            peer.settimeout(_SEND_TIMEOUT_S)
            # The pid as this kernel namespace sees it, because this process checks whether it is dead.
            identity = Identity.of(pid)
            send_all(peer, _IDENTITY.pack(identity.pid, identity.start), self._keeper.fds)
        except (OSError, TasukiError) as error:
            # The peer has hung up or ended; only it is affected.
            _log.warning("event=pool_not_joined pid=%d error=%s", pid, error)


def join_pool(path: Path, *, device: str, timeout_s: float) -> None:
    """Makes this process's arenas of `device` take their chunks from the pool behind `path`.

    Must be called before the first arena is created. Raises BadHandle if nothing answers in time or the answer is not a pool.
    """
    allow_descriptors(2 * MAX_ALL_FDS)  # as they arrive, and one kept of each chunk
    message, fds = fetch_all(path, timeout_s=timeout_s)
    try:
        if len(message) != _IDENTITY.size:
            raise BadHandle(f"{path} is not the socket of a pool", socket=path)
        open_pool(fds, device=device, identity=Identity(*_IDENTITY.unpack(message)))
    finally:
        for fd in fds:
            os.close(fd)
