"""The native library through its Python interface, over host memory: pages, budget, descriptors, misuse."""

import ctypes
import gc
import os
from pathlib import Path

import pytest

from tasuki.memory import arena as native
from tasuki.memory.arena import Arena, ArenaState, Keep
from tasuki.memory.shared_chunks import Import, SharedChunk
from tasuki.wire.errors import BadHandle, Busy, InternalError, OutOfGpuMemory
from tests.arenas import pause, resume, resume_async

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def weights():
    arena = Arena("weights", device="cpu", min_chunk_bytes=MIB, max_chunk_bytes=8 * MIB)
    yield arena
    if arena.usage().num_blocks:
        gc.collect()  # a failed test's traceback holds its locals
    arena.close()


@pytest.fixture
def host_budget():
    yield native.set_host_budget
    native.set_host_budget(0)


def filled(arena, num_bytes, value=7):
    block = arena.buffer(num_bytes)
    memoryview(block).cast("B")[:] = bytes([value]) * num_bytes
    return block


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def address_of(block):
    return ctypes.addressof(block)


def num_open_fds():
    return len(os.listdir("/proc/self/fd"))


def test_resident_memory_falls_by_the_tags_bytes_and_comes_back_at_the_same_address(weights):
    block = filled(weights, 64 * MIB)
    address, awake = address_of(block), resident_bytes()
    assert pause([weights]) == 64 * MIB
    assert awake - resident_bytes() >= 0.95 * 64 * MIB
    assert resume([weights]) == 64 * MIB
    memoryview(block).cast("B")[:] = b"\x01" * (64 * MIB)
    assert address_of(block) == address
    assert resident_bytes() >= awake - 0.05 * 64 * MIB


def test_resume_without_room_is_refused_with_the_numbers_and_every_arena_stays_asleep(weights, host_budget):
    kv_cache = Arena("kv_cache", device="cpu", min_chunk_bytes=MIB)
    blocks = [filled(weights, 16 * MIB), filled(kv_cache, 32 * MIB)]
    pause([weights, kv_cache])
    host_budget(40 * MIB)
    with pytest.raises(OutOfGpuMemory, match=r"cpu needs 48.00 MiB for weights, kv_cache, 40.00 MiB free") as refused:
        resume([weights, kv_cache])
    assert refused.value.metadata == {
        "tag": "weights,kv_cache",
        "needed_bytes": str(48 * MIB),
        "free_bytes": str(40 * MIB),
        "device": "cpu",
    }
    assert {weights.usage().state, kv_cache.usage().state} == {ArenaState.PAUSED}
    assert resume([kv_cache]) == 32 * MIB
    del blocks
    gc.collect()
    kv_cache.close()


def test_a_foreign_or_twice_freed_address_is_refused(weights):
    address = weights.allocate(4096)
    with pytest.raises(InternalError, match="in no arena"):
        weights.free(4096)
    weights.free(address)
    with pytest.raises(InternalError, match="no block of weights"):
        weights.free(address)


def test_an_arena_with_live_blocks_is_not_closed(weights):
    block = filled(weights, MIB)
    with pytest.raises(Busy, match="1 blocks in use"):
        weights.close()
    del block


def test_an_asynchronous_resume_ends_in_wait(weights):
    weights.set_policy(Keep.CONTENT)
    block = filled(weights, 2 * MIB, 5)
    assert pause([weights]) == 2 * MIB
    transfer = resume_async([weights])
    assert weights.usage().state is ArenaState.RESUMING
    assert transfer.wait() == 2 * MIB
    assert set(bytes(block)) == {5}
    with pytest.raises(InternalError, match="taken already"):
        transfer.wait()


def test_an_import_of_what_is_no_chunk_is_a_bad_handle():
    with Path("/proc/self/exe").open("rb") as file:
        chunk = SharedChunk(offset=0, num_bytes=PAGE, fd=file.fileno())
        with pytest.raises(BadHandle, match="not a sealed memfd"):
            Import([chunk], device="cpu")
    with pytest.raises(BadHandle, match="no chunks"):
        Import([], device="cpu")
