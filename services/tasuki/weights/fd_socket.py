"""Sends a message and file descriptors to peers of the same user, over a 0600 unix socket (SCM_RIGHTS)."""

import errno
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tasuki.wire.address import remove_dead_socket
from tasuki.wire.errors import BadHandle

MAX_FDS = 253
"""The kernel's limit per message."""
_LENGTH = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_SEND_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)


class FdServer:
    """Sends a message and descriptors to every peer that connects, from a thread, until `close`.

    fds: 1 to MAX_FDS, owned by the caller. Raises NodeRunning if something answers on the socket; replaces a leftover file.
    """

    def __init__(self, path: Path, *, message: bytes, fds: Sequence[int]) -> None:
        self.path = path
        self._lock = threading.Lock()
        self.hand_out(message, fds)
        self._listener = listen(path)
        self._thread = threading.Thread(target=self._serve, name=f"fd-server-{path.name}", daemon=True)
        self._thread.start()

    def hand_out(self, message: bytes, fds: Sequence[int]) -> None:
        """Sends this from now on; earlier descriptors are no longer used."""
        assert 1 <= len(fds) <= MAX_FDS
        with self._lock:
            self._frame, self._fds = _LENGTH.pack(len(message)) + message, list(fds)

    def stop_serving(self) -> None:
        """Stops sending: peers that connect are disconnected."""
        with self._lock:
            self._frame, self._fds = b"", []

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            # Wakes the thread in accept(); close() alone would not.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._listener.close()
            self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return
                raise
            with peer:
                self._send(peer)

    def _send(self, peer: socket.socket) -> None:
        peer.settimeout(_SEND_TIMEOUT_S)
        _, uid = peer_ids(peer)
        if uid != os.getuid():
            _log.warning("event=fd_refused socket=%s peer_uid=%d", self.path.name, uid)
            return
        try:
            with self._lock:
                # The descriptors go with the first bytes, which the socket buffer can hold.
                frame = self._frame
                sent = socket.send_fds(peer, [frame], self._fds) if self._fds else 0
            if sent < len(frame):  # a peer that has everything may already have hung up
                peer.sendall(frame[sent:])
        except OSError as error:
            # The peer hung up or hangs; only it is affected.
            _log.warning("event=fd_send_failed socket=%s error=%s", self.path.name, error)


def fetch(path: Path, *, timeout_s: float) -> tuple[bytes, list[int]]:
    """Receives the message and descriptors from the server on `path`; the caller owns the descriptors.

    Raises BadHandle if nothing answers in time, the server belongs to another user, or the frame is truncated or malformed.
    """
    deadline = time.monotonic() + timeout_s
    with _connected(path, timeout_s=timeout_s) as peer:
        first, fds, flags, _ = socket.recv_fds(peer, 64 * 1024, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        try:
            if not fds and not first:
                raise BadHandle(f"{path} shares nothing now: the published memory has been freed", socket=path)
            if not fds or flags & socket.MSG_CTRUNC:
                raise BadHandle(f"{path} sent {len(fds)} descriptors, and perhaps more; 1 to {MAX_FDS} fit", socket=path)
            return _read_message(peer, first, path=path, deadline=deadline), fds
        except BaseException:
            close_all(fds)
            raise


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


@contextmanager
def _connected(path: Path, *, timeout_s: float) -> Iterator[socket.socket]:
    """A connection to a server of this user. Inside, a failing socket is a BadHandle, too."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        try:
            peer.settimeout(timeout_s)
            peer.connect(str(path))
            _, uid = peer_ids(peer)
            if uid != os.getuid():
                raise BadHandle(f"{path} belongs to user {uid}", socket=path)
            yield peer
        except TimeoutError as error:
            raise BadHandle(f"{path} gave no descriptor within {timeout_s:g} s", socket=path) from error
        except OSError as error:
            raise BadHandle(f"{path} gave no descriptor: {error}", socket=path) from error


def _read_message(peer: socket.socket, received: bytes, *, path: Path | str, deadline: float) -> bytes:
    frame, needed = bytearray(received), _LENGTH.size
    while True:
        if len(frame) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(frame)
            needed = _LENGTH.size + length
            if length > _MAX_MESSAGE_BYTES:
                raise BadHandle(f"{path} announced a message of {length} bytes; {_MAX_MESSAGE_BYTES} are allowed", socket=path)
        if len(frame) >= needed:
            break
        peer.settimeout(max(0.001, deadline - time.monotonic()))
        more = peer.recv(64 * 1024)
        if not more:
            raise BadHandle(f"{path} hung up after {len(frame)} of {needed} bytes", socket=path)
        frame += more
    if len(frame) != needed:
        raise BadHandle(f"{path} sent {len(frame) - needed} bytes too many", socket=path)
    return bytes(frame[_LENGTH.size :])


def listen(path: Path) -> socket.socket:
    """A listening socket to which only its user can connect. Raises NodeRunning if something answers there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        remove_dead_socket(path)
        listener.bind(str(path))
        # Nobody can connect before listen(), so the socket is never open to others.
        path.chmod(0o600)
        listener.listen(16)
    except BaseException:
        listener.close()
        raise
    return listener


def peer_ids(peer: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as reported by the kernel."""
    pid, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid
