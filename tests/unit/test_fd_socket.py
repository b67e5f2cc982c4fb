"""Passing a descriptor over a unix socket, and misbehaving peers."""

import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tasuki.weights.fd_socket import MAX_FDS, FdServer, fetch
from tasuki.wire.errors import BadHandle, NodeRunning
from tests.limits import limit_s

MESSAGE = b"manifest" * 40_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w.sock"


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.write(fd, b"weights")
    yield fd
    os.close(fd)


def num_open_fds() -> int:
    """Number of open descriptors; it may still fall as threads of earlier tests end."""
    return len(os.listdir("/proc/self/fd"))


def test_message_and_descriptor_arrive_as_often_as_asked(path: Path, fd: int) -> None:
    server = FdServer(path, message=MESSAGE, fds=[fd])
    for _ in range(3):
        message, [received] = fetch(path, timeout_s=5)
        assert message == MESSAGE
        assert os.pread(received, 7, 0) == b"weights"
        os.close(received)
    server.close()


def test_as_many_descriptors_arrive_in_order_as_one_message_takes(path: Path, fd: int) -> None:
    other = os.memfd_create("other")
    server = FdServer(path, message=MESSAGE, fds=[fd, *[other] * (MAX_FDS - 1)])
    message, received = fetch(path, timeout_s=5)
    assert (message, len(received)) == (MESSAGE, MAX_FDS)
    assert [os.fstat(one).st_size for one in received] == [7, *[0] * (MAX_FDS - 1)]
    for one in [*received, other]:
        os.close(one)
    server.close()


def test_socket_is_for_its_owner_alone_and_goes_with_the_server(path: Path, fd: int) -> None:
    server = FdServer(path, message=b"", fds=[fd])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server.close()
    server.close()
    assert not path.exists()
    with pytest.raises(BadHandle, match="gave no descriptor"):
        fetch(path, timeout_s=1)


def test_socket_left_by_a_dead_server_is_replaced(path: Path, fd: int) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = FdServer(path, message=b"x", fds=[fd])
    message, [received] = fetch(path, timeout_s=5)
    os.close(received)
    assert message == b"x"
    server.close()


@pytest.mark.parametrize("what", ["folder", "file", "dangling link", "link to itself"])
def test_what_is_no_socket_is_named_and_stays(path: Path, fd: int, what: str) -> None:
    match what:
        case "folder":
            path.mkdir()
        case "file":
            path.write_text("kept")
        case "dangling link":
            path.symlink_to(path.with_name("nowhere"))
        case _:
            path.symlink_to(path)
    with pytest.raises(NodeRunning, match="is not a socket; remove it") as refused:
        FdServer(path, message=b"", fds=[fd])
    assert refused.value.metadata["address"] == str(path)
    assert path.lstat()


@contextmanager
def rogue(path: Path, answer: Callable[[socket.socket], object]) -> Iterator[None]:
    """A server that answers one peer in its own way."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        peer, _ = listener.accept()
        with peer, suppress(BrokenPipeError):  # a peer may hang up before the answer
            answer(peer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        listener.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda peer: socket.send_fds(peer, [struct.pack("<Q", 100) + b"x" * 10], [0]), "hung up after 18 of 108 bytes"),
        (lambda peer: socket.send_fds(peer, [b"\0\0\0"], [0]), "hung up after 3 of 8 bytes"),
        (lambda peer: socket.send_fds(peer, [struct.pack("<Q", 1) + b"xyz"], [0]), "sent 2 bytes too many"),
        (lambda peer: socket.send_fds(peer, [struct.pack("<Q", 1 << 40)], [0]), "announced a message of"),
        (lambda peer: peer.sendall(struct.pack("<Q", 1) + b"x"), "sent 0 descriptors"),
        (lambda peer: socket.send_fds(peer, [struct.pack("<Q", 100) + b"x" * 10], [0, 1, 2] * 80), "hung up after 18 of 108"),
        (lambda peer: None, "shares nothing now"),
    ],
)
def test_malformed_answers_are_refused_and_leak_no_descriptor(
    path: Path, answer: Callable[[socket.socket], object], message: str
) -> None:
    before = num_open_fds()
    with rogue(path, answer), pytest.raises(BadHandle, match=message):
        fetch(path, timeout_s=5)
    assert num_open_fds() <= before


@pytest.mark.parametrize("sent", [b"", struct.pack("<Q", 100) + b"x"])
def test_a_server_that_hangs_is_left_in_time(path: Path, sent: bytes) -> None:
    done = threading.Event()

    def stall(peer: socket.socket) -> None:
        if sent:
            socket.send_fds(peer, [sent], [0])
        done.wait(10)

    started = time.monotonic()
    with rogue(path, stall):
        with pytest.raises(BadHandle, match="gave no descriptor within 0.3 s"):
            fetch(path, timeout_s=0.3)
        done.set()
    assert time.monotonic() - started < limit_s(5)


# --- a process of another user, as the kernel reports it; here this process pretends to have another uid


def test_a_peer_of_another_user_gets_nothing(
    path: Path, fd: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = FdServer(path, message=MESSAGE, fds=[fd])
    peer_uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: peer_uid + 1)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(5)
        peer.connect(str(path))
        assert socket.recv_fds(peer, 100, 1)[:2] == (b"", [])
    server.close()
    assert [record.getMessage() for record in caplog.records] == [f"event=fd_refused socket=w.sock peer_uid={peer_uid}"]


def test_a_server_of_another_user_is_not_listened_to(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, server_uid = num_open_fds(), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: server_uid + 1)
    with (
        rogue(path, lambda peer: socket.send_fds(peer, [struct.pack("<Q", 1) + b"x"], [0])),
        pytest.raises(BadHandle, match=f"w.sock belongs to user {server_uid}"),
    ):
        fetch(path, timeout_s=5)
    assert num_open_fds() <= before
