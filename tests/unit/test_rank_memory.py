"""Memory that an engine rank keeps over a pause: non-parameter bytes in the weights' region, and the cache's small tables."""

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasuki.memory.arena import NativeAllocator
from tasuki.rollout.rank import RankMemory, Span, rank_allocator, without
from tasuki.v1.memory_pb2 import PauseRequest, ResumeRequest
from tasuki.wire.stages import MemoryTag

WEIGHTS, KV_CACHE = MemoryTag.WEIGHTS, MemoryTag.KV_CACHE
SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=6)


def addresses(spans: list[Span]) -> set[int]:
    return {start + offset for start, num_bytes in spans for offset in range(num_bytes)}


@given(
    blocks=st.lists(st.integers(0, 9), unique=True), lengths=st.lists(st.integers(1, 8), min_size=10, max_size=10), holes=SPANS
)
def test_what_is_left_is_every_byte_of_a_block_that_is_in_no_hole(blocks: list[int], lengths: list[int], holes: list[Span]):
    given_blocks = [(block * 8, lengths[block]) for block in blocks]
    left = without(given_blocks, holes)
    assert addresses(left) == addresses(given_blocks) - addresses(holes)
    assert sum(num_bytes for _, num_bytes in left) == len(addresses(left))


@pytest.fixture
def allocator() -> Iterator[NativeAllocator]:
    made = rank_allocator("cpu")
    yield made
    gc.collect()
    made.close()


class Engine(torch.nn.Module):
    """Tensors of a rank: a parameter over half of its storage, a buffer, and a tensor that only a closure holds."""

    def __init__(self) -> None:
        super().__init__()
        storage = torch.arange(8192.0)
        self.weight = torch.nn.Parameter(storage[:4096], requires_grad=False)
        self.register_buffer("table", torch.arange(3000.0))
        orphan = torch.arange(5000.0)
        self.beside = lambda: storage[4096:].clone()
        self.orphan = lambda: orphan.clone()

    def load_weights(self, weights: object) -> None: ...


def pause(memory: RankMemory, tag: MemoryTag) -> int:
    return memory.pause(PauseRequest(tags=[tag.number])).released_bytes


def resume(memory: RankMemory, tag: MemoryTag) -> int:
    return memory.resume(ResumeRequest(tags=[tag.number])).mapped_bytes


def test_only_parameters_are_lost_with_the_weights(allocator: NativeAllocator) -> None:
    with allocator.region(WEIGHTS):
        engine = Engine()
    memory = RankMemory(allocator, engine)
    before = engine.beside(), engine.table.clone(), engine.orphan()
    for _ in range(2):
        pause(memory, WEIGHTS)
        resume(memory, WEIGHTS)
        assert not engine.weight.any()
        assert all(
            torch.equal(old, new) for old, new in zip(before, (engine.beside(), engine.table, engine.orphan()), strict=True)
        )
        engine.weight.copy_(torch.ones(4096))
    (usage, _) = memory.usage()
    assert (MemoryTag.of(usage.tag), usage.host_copy_bytes) == (WEIGHTS, 4 * (4096 + 3000 + 5000))


def test_what_changed_since_the_last_pause_is_kept_as_it_is_now(allocator: NativeAllocator) -> None:
    with allocator.region(WEIGHTS):
        engine = Engine()
    memory = RankMemory(allocator, engine)
    pause(memory, WEIGHTS)
    resume(memory, WEIGHTS)
    engine.table.fill_(7)
    pause(memory, WEIGHTS)
    resume(memory, WEIGHTS)
    assert bool((engine.table == 7).all())


def test_a_repeated_pause_does_not_overwrite_what_was_kept(allocator: NativeAllocator) -> None:
    with allocator.region(WEIGHTS):
        engine = Engine()
    memory = RankMemory(allocator, engine)
    expected = engine.orphan()
    assert pause(memory, WEIGHTS) > 0
    assert pause(memory, WEIGHTS) == 0
    resume(memory, WEIGHTS)
    assert resume(memory, WEIGHTS) == 0
    assert torch.equal(engine.orphan(), expected)


def test_of_the_cache_only_small_tables_are_kept(allocator: NativeAllocator) -> None:
    with allocator.region(KV_CACHE):
        layers, addresses_of_layers = torch.ones(1 << 20), torch.arange(1024)
    memory = RankMemory(allocator, Engine())
    pause(memory, KV_CACHE)
    resume(memory, KV_CACHE)
    assert not layers.any()
    assert torch.equal(addresses_of_layers, torch.arange(1024))
