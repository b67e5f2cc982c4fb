"""Another user's process that connects to a rank's gloo port before the true peer does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.transport.gloo_peers import check_peers
from tasuki.wire.errors import PeerUnavailable
from tests.conftest import ENVIRONMENT
from tests.sockets import NOBODY, listeners

LIMIT_S = 90.0
RANK = """
import sys
from datetime import timedelta
import torch.distributed as dist
from tasuki.transport.gloo_peers import check_gloo_peers
from tasuki.wire.errors import PeerUnavailable
check_gloo_peers()
check_gloo_peers()
store, rank = dist.FileStore(sys.argv[1], 2), int(sys.argv[2])
try:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    given = [None] * 2
    dist.all_gather_object(given, f"from {rank}")
    print(given)
except PeerUnavailable as error:
    print("refused:", error)
"""
# Connects to a rank's port as each of the peers that the rank may wait for: gloo numbers its connections from zero.
STRANGER = """
import os, socket, struct, sys, time
uid, port = map(int, sys.argv[1:])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
held = [socket.socket() for _ in range(8)]
for number, one in enumerate(held):
    one.connect(("127.0.0.1", port))
    one.send(struct.pack("q", number))
print("connected", flush=True)
time.sleep(600)
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(started: list[subprocess.Popen[str]], code: str, *arguments: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", code, *map(str, arguments)]
    environment = ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
    started.append(process)
    return process


def test_ranks_of_one_user_reach_each_other(started: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    ranks = [start(started, RANK, tmp_path / "store", rank) for rank in range(2)]
    assert [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks] == ["['from 0', 'from 1']\n"] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_rank_refuses_a_peer_of_another_user_before_it_takes_anything_from_it(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    first = start(started, RANK, tmp_path / "store", 0)
    deadline = time.monotonic() + LIMIT_S
    while not (ports := [listener.port for listener in listeners([first.pid])]):
        assert time.monotonic() < deadline, "the rank does not listen"
        time.sleep(0.05)
    stranger = start(started, STRANGER, NOBODY, *ports)
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == "connected\n"
    start(started, RANK, tmp_path / "store", 1)
    assert first.communicate(timeout=LIMIT_S)[0].startswith(f"refused: a process of user {NOBODY} ")


def test_a_connection_to_this_user_is_taken_and_one_that_is_missing_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            inodes = {os.fstat(end.fileno()).st_ino for end in (server, client, accepted)}
            check_peers(inodes, num_peers=2)
            with pytest.raises(PeerUnavailable, match="2 of 3 gloo peers are connected"):
                check_peers(inodes, num_peers=3)
