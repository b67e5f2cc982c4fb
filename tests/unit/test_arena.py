"""Arenas through their Python interface, over host memory, and tensors made inside a region; csrc/tests has the library's own facts."""

import gc
import os
import threading
from pathlib import Path

import pytest
import torch

from tasuki.memory import arena as native
from tasuki.memory.arena import Arena, ArenaState, Keep, NativeAllocator
from tasuki.memory.shared_chunks import Export, Import, SharedChunk
from tasuki.wire.errors import BadHandle, Busy, InternalError, OutOfGpuMemory
from tasuki.wire.stages import MemoryTag

MIB = 1 << 20
WEIGHTS, OPTIMIZER, KV_CACHE = MemoryTag.WEIGHTS, MemoryTag.OPTIMIZER, MemoryTag.KV_CACHE


@pytest.fixture
def allocator():
    made = NativeAllocator(tags=[WEIGHTS, OPTIMIZER, KV_CACHE], device="cpu", keep={OPTIMIZER: Keep.CONTENT})
    yield made
    if any(usage.total_bytes for usage in made.usage()):
        gc.collect()  # reference cycles hold tensors
    made.close()


def used_bytes(allocator, tag=WEIGHTS):
    return allocator.arena(tag).usage().used_bytes


FACTORIES = {
    "empty": lambda: torch.empty(64, 33).fill_(2),
    "zeros": lambda: torch.zeros(64, 33, dtype=torch.int64),
    "ones": lambda: torch.ones(64, 33, dtype=torch.bfloat16),
    "full": lambda: torch.full((64, 33), 2.5),
    "full of bool": lambda: torch.full((64, 64), True),
    "empty_strided": lambda: torch.empty_strided((64, 33), (1, 64)).fill_(1),
    "channels last": lambda: torch.empty(2, 3, 16, 16, memory_format=torch.channels_last).fill_(1),
    "new_zeros": lambda: torch.ones(1).new_zeros(64, 33),
    "new_full": lambda: torch.ones(1).new_full((64, 33), 3),
    "arange": lambda: torch.arange(5000),
    "tensor": lambda: torch.tensor(list(range(5000))),
    "complex": lambda: torch.zeros(64, 33, dtype=torch.complex64),
    "parameter": lambda: torch.nn.Parameter(torch.ones(64, 33)),
    "cat": lambda: torch.cat([torch.ones(40, 33), torch.zeros(40, 33)]),
    "rand with a seed": lambda: torch.randn(64, 33, generator=torch.Generator().manual_seed(1)),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_makes_the_same_tensor_inside_as_outside(allocator, name):
    outside = FACTORIES[name]()
    with allocator.region(WEIGHTS):
        inside = FACTORIES[name]()
    assert torch.equal(inside, outside)
    assert (inside.dtype, inside.stride(), type(inside)) == (outside.dtype, outside.stride(), type(outside))
    assert 0 <= used_bytes(allocator) - inside.untyped_storage().nbytes() < 512


@pytest.mark.parametrize(
    "derive",
    [
        torch.zeros_like,
        torch.ones_like,
        torch.clone,
        lambda x: x.to(torch.float64),
        lambda x: x.T.contiguous(),
        lambda x: x * 2,
    ],
)
def test_derived_tensors_are_in_the_arena_and_their_sources_are_not(allocator, derive):
    source = torch.arange(4096.0).view(64, 64)
    with allocator.region(WEIGHTS):
        inside = derive(source)
    assert torch.equal(inside, derive(source))
    assert 0 <= used_bytes(allocator) - inside.untyped_storage().nbytes() < 512


def test_views_share_their_storage_and_small_tensors_stay_in_the_heap(allocator):
    with allocator.region(WEIGHTS):
        base = torch.zeros(64, 64)
        view = base[1:].T
        view.add_(1)
        small = torch.zeros(16)
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert base.sum() == 63 * 64
    assert small.sum() == 0
    assert used_bytes(allocator) == 64 * 64 * 4


def test_freeing_the_last_tensor_frees_the_bytes_and_the_pages(allocator):
    with allocator.region(WEIGHTS):
        tensor = torch.ones(8 * MIB // 4)
    view = tensor[5:]
    del tensor
    assert used_bytes(allocator) == 8 * MIB
    del view
    usage = allocator.arena(WEIGHTS).usage()
    assert (usage.used_bytes, usage.mapped_bytes, usage.num_blocks) == (0, 0, 0)


def test_an_optimizer_made_inside_steps_as_one_outside(allocator):
    def train(region):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(4, 64)).square().sum().backward()
            with region():
                optimizer.step()
            optimizer.zero_grad()
            allocator.pause([OPTIMIZER])
            allocator.resume([OPTIMIZER])
        return model.weight.detach().clone(), optimizer

    inside, optimizer = train(lambda: allocator.region(OPTIMIZER))
    assert used_bytes(allocator, OPTIMIZER) >= 2 * 64 * 64 * 4
    outside, _ = train(torch.no_grad)
    assert torch.equal(inside, outside)
    del optimizer


def test_other_threads_allocate_outside_the_region(allocator):
    made = []
    with allocator.region(WEIGHTS):
        thread = threading.Thread(target=lambda: made.append(torch.zeros(MIB)))
        thread.start()
        thread.join()
    assert used_bytes(allocator) == 0
    assert made[0].sum() == 0


def test_regions_nest_and_the_inner_one_wins(allocator):
    with allocator.region(WEIGHTS):
        with allocator.region(KV_CACHE):
            inner = torch.zeros(MIB)
        outer = torch.zeros(MIB)
    assert (used_bytes(allocator, KV_CACHE), used_bytes(allocator)) == (4 * MIB, 4 * MIB)
    del inner, outer


def test_the_inner_tensor_of_a_wrapper_lies_in_the_arena(allocator):
    from torch.testing._internal.two_tensor import TwoTensor

    source = TwoTensor(torch.ones(64, 64), torch.ones(64, 64))
    with allocator.region(WEIGHTS):
        wrapped = torch.zeros_like(source)
    assert used_bytes(allocator) == 2 * 64 * 64 * 4
    assert torch.equal(wrapped.a, torch.zeros(64, 64))


TAGS = (WEIGHTS, KV_CACHE)
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def weights(allocator: NativeAllocator) -> Arena:
    return allocator.arena(WEIGHTS)


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
