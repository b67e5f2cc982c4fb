"""Another user's process that connects to a rank's gloo port before the real peer."""

import ctypes
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed as dist

from tasuki.weights.gloo_peers import check_gloo_peers, check_peers, close_listeners
from tasuki.wire.errors import PeerUnavailable
from tests.conftest import ENVIRONMENT
from tests.integration.forked import processes
from tests.sockets import NOBODY, listeners

LIMIT_S = 90.0
# Connects as each peer for which the rank may wait: gloo numbers its connections from zero.
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


@dataclass(frozen=True)
class Rank:
    process: BaseProcess
    answers: Connection

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def answer(self) -> str:
        assert self.answers.poll(LIMIT_S), "the rank gave no answer"
        return self.answers.recv()


def drop_capabilities() -> None:
    """Makes root an ordinary user for the kernel, in this process. Source: man 2 capset."""
    header, no_sets = struct.pack("Ii", 0x20080522, 0), bytes(24)
    if ctypes.CDLL(None, use_errno=True).capset(header, no_sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def run_rank(store_path: Path, rank: int, answers: Connection) -> None:
    """Meets the other rank, without capabilities as most users; sends the values that all gave, or the reason of a refusal."""
    drop_capabilities()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    check_gloo_peers()
    check_gloo_peers()
    store = dist.FileStore(str(store_path), 2)
    given: list[str] = [""] * 2
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
        dist.all_gather_object(given, f"from {rank}")
        answers.send(f"{given}")
        while answers.recv():
            dist.all_gather_object(given, f"again from {rank}", group=dist.new_group(backend="gloo"))
            answers.send(f"{given}")
    except PeerUnavailable as error:
        answers.send(f"refused: {error}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Rank]]:
    """Starts a rank of two."""
    ranks: list[Rank] = []

    def started(rank: int) -> Rank:
        ours, theirs = processes.Pipe()
        process = processes.Process(target=run_rank, args=(tmp_path / "store", rank, theirs), daemon=True)
        process.start()
        ranks.append(Rank(process, ours))
        return ranks[-1]

    yield started
    for rank in ranks:
        rank.process.kill()
        rank.process.join()
        rank.answers.close()


def test_ranks_that_met_take_no_further_connection_and_go_on(start: Callable[[int], Rank]) -> None:
    ranks = [start(rank) for rank in range(2)]
    assert [rank.answer() for rank in ranks] == ["['from 0', 'from 1']"] * 2
    for _ in range(2):
        ports = {one.port for rank in ranks for one in listeners([rank.pid]) if one.kind != "unix"}
        assert len(ports) >= 2
        for port in ports:
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), timeout=0.2)
        for rank in ranks:
            rank.answers.send(True)
        assert [rank.answer() for rank in ranks] == ["['again from 0', 'again from 1']"] * 2
    for rank in ranks:
        rank.answers.send(False)
        rank.process.join(LIMIT_S)
        assert rank.process.exitcode == 0


@pytest.mark.parametrize(("bound", "reached"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "::1"), ("::", "127.0.0.1")])
def test_a_closed_port_takes_no_connection_and_earlier_ones_go_on(bound: str, reached: str) -> None:
    others = {each.stat().st_ino for each in Path("/proc/self/fd").iterdir() if each.exists()}
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    with socket.create_server((bound, 0), family=family, dualstack_ipv6=bound == "::") as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((reached, port)) as earlier:
            accepted, _ = listener.accept()
            with accepted:
                close_listeners(besides=others)
                with pytest.raises(TimeoutError):
                    socket.create_connection((reached, port), timeout=0.2)
                earlier.sendall(b"still connected")
                assert accepted.recv(64) == b"still connected"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_rank_refuses_a_peer_of_another_user_before_it_takes_anything_from_it(start: Callable[[int], Rank]) -> None:
    first = start(0)
    deadline = time.monotonic() + LIMIT_S
    while not (ports := [one.port for one in listeners([first.pid]) if one.kind != "unix"]):
        assert time.monotonic() < deadline, "the rank does not listen"
        time.sleep(0.05)
    argv = [sys.executable, "-c", STRANGER, *map(str, (NOBODY, *ports))]
    with subprocess.Popen(argv, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as stranger:
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "connected\n"
            start(1)
            assert first.answer().startswith(f"refused: a process of user {NOBODY} ")
        finally:
            stranger.kill()


def test_a_connection_to_this_user_is_taken_and_one_that_is_missing_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            inodes = {os.fstat(end.fileno()).st_ino for end in (server, client, accepted)}
            check_peers(inodes, num_peers=2)
            with pytest.raises(PeerUnavailable, match="2 of 3 gloo peers are connected"):
                check_peers(inodes, num_peers=3)
