"""The native library through its Python interface, over host memory; csrc/tests has its own facts."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.memory import arena as native
from tasuki.memory.arena import Arena, ArenaState, NativeAllocator
from tasuki.memory.shared_chunks import Export, Import, SharedChunk
from tasuki.wire.errors import BadHandle, Busy, InternalError, OutOfGpuMemory
from tasuki.wire.stages import MemoryTag

MIB = 1 << 20
TAGS = (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def allocator() -> Iterator[NativeAllocator]:
    made = NativeAllocator(tags=TAGS, device="cpu")
    yield made
    made.close()


@pytest.fixture
def weights(allocator: NativeAllocator) -> Arena:
    return allocator.arena(MemoryTag.WEIGHTS)


def test_resume_without_room_is_refused_with_the_numbers_and_every_tag_stays_asleep(allocator: NativeAllocator) -> None:
    arenas = [allocator.arena(tag) for tag in TAGS]
    blocks = [arena.allocate(num_bytes) for arena, num_bytes in zip(arenas, (16 * MIB, 32 * MIB), strict=True)]
    assert allocator.pause(TAGS) == 48 * MIB
    native.set_host_budget(40 * MIB)
    try:
        with pytest.raises(OutOfGpuMemory, match=r"cpu needs 48.00 MiB for weights, kv_cache, 40.00 MiB free") as refused:
            allocator.resume(TAGS)
        told = {"tag": "weights,kv_cache", "needed_bytes": str(48 * MIB), "free_bytes": str(40 * MIB), "device": "cpu"}
        assert refused.value.metadata == told
        assert {arena.usage().state for arena in arenas} == {ArenaState.PAUSED}
        assert allocator.resume(TAGS[1:]) == 32 * MIB
    finally:
        native.set_host_budget(0)
    for arena, block in zip(arenas, blocks, strict=True):
        arena.free(block)


def test_misuse_is_an_error_of_its_kind(weights: Arena) -> None:
    address = weights.allocate(4096)
    with pytest.raises(Busy, match="1 blocks in use"):
        weights.close()
    weights.free(address)
    with pytest.raises(InternalError, match="no block of weights"):
        weights.free(address)
    with Path("/proc/self/exe").open("rb") as file, pytest.raises(BadHandle, match="not a sealed memfd"):
        Import([SharedChunk(offset=0, num_bytes=PAGE, fd=file.fileno())], device="cpu")


def test_what_a_peer_may_hold_is_not_counted_as_given_back(allocator: NativeAllocator, weights: Arena) -> None:
    address = weights.allocate(8 * MIB)
    export = Export(weights)
    peer = Import(export.chunks, device="cpu")
    native.buffer_at(address, 1)[0] = b"\x05"
    assert native.buffer_at(peer.base + address - export.base, 1)[0] == b"\x05"
    assert weights.usage().exported_bytes == 8 * MIB
    assert allocator.pause(TAGS[:1]) == 0
    assert weights.usage().held_bytes == 8 * MIB
    peer.close()
    export.close()
    assert weights.usage().held_bytes == 0
    weights.free(address)
