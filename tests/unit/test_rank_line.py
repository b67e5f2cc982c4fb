"""A rank's line: answers of the scheduler's thread go out, commands of the front are run and answered in the line's own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import zmq

from tasuki.rollout.rank_line import RankLine, line_identity


@pytest.fixture
def front(tmp_path: Path):
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    socket.bind(f"ipc://{tmp_path}/front.sock")
    yield socket
    socket.close(linger=0)
    context.term()


def test_every_rank_is_addressed_by_itself_once_it_has_answered(front: zmq.Socket[bytes], tmp_path: Path) -> None:
    threads: list[str] = []

    def run(rank: int, command: bytes) -> bytes:
        threads.append(threading.current_thread().name)
        return b"%d ran %s" % (rank, command)

    lines = [
        RankLine(f"ipc://{tmp_path}/front.sock", rank=rank, run=lambda command, rank=rank: run(rank, command))
        for rank in range(2)
    ]
    for line in lines:
        line.send(b"hello")
    assert sorted(front.recv_multipart() for _ in lines) == [[line_identity(rank), b"hello"] for rank in range(2)]
    for rank in range(2):
        front.send_multipart([line_identity(rank), b"receive"])
    assert sorted(front.recv_multipart() for _ in lines) == [
        [line_identity(rank), b"%d ran receive" % rank] for rank in range(2)
    ]
    assert set(threads) == {"front-line"}
    lines[1].close()
    front.send_multipart([line_identity(0), b"usage"])
    assert front.recv_multipart() == [line_identity(0), b"0 ran usage"]
    lines[0].close()
    assert "front-line" not in {thread.name for thread in threading.enumerate()}
