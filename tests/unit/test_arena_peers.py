"""Arena chunks mapped by another process: it sees the bytes, keeps them alive, and may die holding them."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from tasuki.memory import arena as native
from tasuki.memory.arena import Arena
from tasuki.memory.shared_chunks import Export
from tests.arenas import pause, resume
from tests.limits import wait_for

MIB = 1 << 20

PEER = """
import sys
from tasuki.memory.arena import buffer_at
from tasuki.memory.shared_chunks import Import, SharedChunk
peer = Import([SharedChunk(*map(int, one.split(":"))) for one in sys.argv[1:]], device="cpu")
for line in sys.stdin:
    verb, *numbers = line.split()
    if verb == "read":
        print(buffer_at(peer.base + int(numbers[0]), 1)[0][0], flush=True)
    else:
        buffer_at(peer.base + int(numbers[0]), 1)[0] = bytes([int(numbers[1])])
        print("done", flush=True)
"""


class Peer:
    def __init__(self, export):
        fds = [chunk.fd for chunk in export.chunks]
        chunks = [f"{chunk.offset}:{chunk.num_bytes}:{chunk.fd}" for chunk in export.chunks]
        command = [sys.executable, "-c", PEER, *chunks]
        roots = Path(native.__file__).parents[2]
        path = f"{roots}:{roots.parent / 'protos'}"
        self.process = subprocess.Popen(
            command, pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": path}
        )

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def weights():
    arena = Arena("weights", device="cpu", min_chunk_bytes=MIB, max_chunk_bytes=4 * MIB)
    yield arena
    gc.collect()
    arena.close()


@pytest.fixture
def peers():
    started = []

    def start(export):
        started.append(Peer(export))
        return started[-1]

    yield start
    for peer in started:
        peer.kill()


def filled(arena, num_bytes, value):
    block = arena.buffer(num_bytes)
    memoryview(block).cast("B")[:] = bytes([value]) * num_bytes
    return block


HELD = 256 * MIB
"""Bytes that a peer holds, large enough to show in the machine's shared memory beside the arenas of other tests."""


def host_shared_bytes():
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["Shmem"].split()[0]) << 10


def test_a_peer_reads_live_bytes_at_the_same_offsets(weights, peers):
    block = filled(weights, 9 * MIB, 4)
    export = Export(weights)
    peer = peers(export)
    export.close_fds()
    assert peer.ask(f"read {8 * MIB}") == "4"
    block[8 * MIB] = b"\x05"
    assert peer.ask(f"read {8 * MIB}") == "5"
    peer.kill()
    export.close()


def test_a_read_only_peer_dies_of_a_write_and_the_bytes_stay(weights, peers):
    block = filled(weights, MIB, 4)
    export = Export(weights)
    peer = peers(export)
    assert peer.ask("write 0 9") == ""
    assert peer.process.wait(timeout=10) < 0
    assert block[0] == b"\x04"
    export.close()


def test_what_a_peer_holds_is_not_counted_as_given_back(weights, peers):
    block = filled(weights, HELD, 4)
    export = Export(weights)
    peer = peers(export)
    assert peer.ask("read 5") == "4"
    export.close_fds()
    assert weights.usage().exported_bytes == HELD
    awake = host_shared_bytes()
    assert pause([weights]) == 0
    assert weights.usage().held_bytes == HELD
    assert host_shared_bytes() > awake - HELD // 2  # the system has not got it back, and the report does not claim so
    peer.kill()
    export.close()
    assert weights.usage().held_bytes == 0
    wait_for(lambda: host_shared_bytes() < awake - HELD // 2)
    resume([weights])
    assert block[0] == b"\0"
