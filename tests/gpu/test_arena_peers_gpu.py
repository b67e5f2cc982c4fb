"""Arenas whose chunks another process maps, on a real GPU. Needs `make native`, one CUDA GPU and no network."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tasuki.memory.shared_chunks import Export
from tasuki.wire.stages import MemoryTag
from tests.gpu.conftest import free_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


GIB, MIB = 1 << 30, 1 << 20


WEIGHTS, KV_CACHE = MemoryTag.WEIGHTS, MemoryTag.KV_CACHE


@pytest.fixture
def peers():
    started = []

    def start(export, device="cuda:0"):
        described = [f"{chunk.offset}:{chunk.num_bytes}:{chunk.fd}" for chunk in export.chunks]
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("arena_peer.py")), device, *described],
            pass_fds=[chunk.fd for chunk in export.chunks], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)

        def ask(line):
            process.stdin.write(line + "\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        return process, ask

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_peer_maps_read_only_sees_live_bytes_and_cannot_write(allocator, peers):
    with allocator.region(WEIGHTS):
        weights = torch.full((3 * GIB,), 4, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    export = Export(allocator.arena(WEIGHTS))
    at = weights.data_ptr() - export.base + 2 * GIB
    _, ask = peers(export)
    export.close_fds()
    assert ask(f"read {at}") == "4"
    weights[2 * GIB] = 9
    torch.cuda.synchronize()
    assert ask(f"read {at}") == "9"
    assert ask(f"write {at} 1").startswith("refused")
    torch.cuda.synchronize()
    assert int(weights[2 * GIB]) == 9
    export.close()


def test_memory_held_by_a_peer_is_accounted_and_comes_back_when_it_is_killed(allocator, peers):
    with allocator.region(KV_CACHE):
        pool = torch.full((4 * GIB,), 4, dtype=torch.uint8, device="cuda")
    export = Export(allocator.arena(KV_CACHE))
    process, ask = peers(export)
    assert ask("read 0") == "4"
    export.close_fds()
    awake = free_bytes()
    assert allocator.pause([KV_CACHE]) == 0
    assert allocator.arena(KV_CACHE).usage().held_bytes == 4 * GIB
    assert abs(free_bytes() - awake) <= 64 * MIB
    process.kill()
    process.wait()
    export.close()
    assert allocator.arena(KV_CACHE).usage().held_bytes == 0
    deadline = time.monotonic() + 10  # the kernel tears a killed process's context down by itself
    while free_bytes() - awake < 4 * GIB and time.monotonic() < deadline:
        time.sleep(0.05)
    assert free_bytes() - awake >= 4 * GIB
    allocator.resume([KV_CACHE])
    pool.fill_(1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_peer_on_another_gpu_reads_the_bytes(allocator, peers):
    with allocator.region(WEIGHTS):
        weights = torch.full((GIB,), 4, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    export = Export(allocator.arena(WEIGHTS))
    _, ask = peers(export, device="cuda:1")
    assert ask(f"read {weights.data_ptr() - export.base}") == "4"
    export.close()
