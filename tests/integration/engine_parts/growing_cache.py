"""A partly mapped KV cache: entries of running requests survive while requests come and go and the cache grows and shrinks."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tasuki.memory.allocator import NativeAllocator
from tasuki.memory.arena import set_host_budget, totals
from tasuki.memory.tags import MemoryTag
from tasuki.rollout.growing_cache import NUM_PARTS, SPARE_SHARE, GrowingCache, Grown, growing_cache
from tasuki.rollout.kv_slots import BoundedPagedSlots, BoundedSlots, BoundedTokenSlots, EverySlot
from tasuki.wire.errors import InternalError, InvalidArgument
from tests.extent import IS_WHOLE, examples

KV = MemoryTag.KV_CACHE
CHUNK = 16 << 10
NUM_TOKENS, ROW, LEAST = 256, 512, 40
PART = NUM_TOKENS // NUM_PARTS
MOST_SPARE = PART + PART // SPARE_SHARE


def bounded(page_size: int) -> BoundedSlots:
    if page_size == 1:
        return BoundedTokenSlots(NUM_TOKENS, torch.uint8, "cpu", SimpleNamespace(), need_sort=False)
    return BoundedPagedSlots(NUM_TOKENS, page_size, torch.uint8, "cpu", SimpleNamespace(), need_sort=False)


class Demand:
    """Demand of requests whose lengths are random."""

    def __init__(self) -> None:
        self.to_come = self.num_admitted = 0
        self.others = NUM_TOKENS
        """Tokens mapped by the other rank of the replica."""

    def tokens_to_come(self) -> int:
        return self.to_come

    def forget_prefixes(self) -> None: ...

    def fewest(self, num_tokens: int) -> int:
        return min(num_tokens, self.others)

    def admit_again(self) -> None:
        self.num_admitted += 1


class Cache:
    """Keys and values of two layers, slots, and the values that requests have written."""

    def __init__(self, page_size: int) -> None:
        self.allocator = NativeAllocator(tags=[KV], device="cpu", chunk_bytes={KV: CHUNK})
        with self.allocator.region(KV):
            self.buffers = [torch.zeros(NUM_TOKENS + page_size, ROW, dtype=torch.uint8) for _ in range(4)]
        self.slots = bounded(page_size)
        self.held: list[torch.Tensor] = []
        self.demand, self.points = Demand(), list[str]()
        self.growing = GrowingCache(self.allocator.arena(KV), self.slots, self.buffers, least_tokens=LEAST, demand=self.demand)

    def grow(self, to_come: int) -> Grown:
        self.demand.to_come = to_come
        return self.growing.grow(self.points.append)

    def shrink(self, to_come: int) -> int:
        self.demand.to_come = to_come
        return self.growing.shrink(self.points.append)

    def take(self, num_slots: int) -> bool:
        slots = self.slots.alloc(num_slots)
        if slots is None:
            return False
        for number, buffer in enumerate(self.buffers):
            buffer[slots] = (slots[:, None] + number).to(torch.uint8)
        self.held.append(slots)
        return True

    def mapped_bytes(self) -> int:
        return self.allocator.arena(KV).usage().mapped_bytes

    def close(self) -> None:
        self.buffers.clear()
        del self.growing
        gc.collect()
        self.allocator.close()


class Requests(RuleBasedStateMachine):
    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(self.page_size)

    @rule(num_pages=st.integers(1, 60))
    def take(self, num_pages: int) -> None:
        num_slots = num_pages * self.page_size
        has_room = num_slots <= self.cache.slots.available_size()
        assert self.cache.take(num_slots) is has_room

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.cache.held:
            number = data.draw(st.integers(0, len(self.cache.held) - 1))
            self.cache.slots.free(self.cache.held.pop(number))

    @rule()
    def free_together(self) -> None:
        self.cache.slots.free_group_begin()
        while self.cache.held:
            self.cache.slots.free(self.cache.held.pop())
        self.cache.slots.free_group_end()

    @rule(to_come=st.integers(0, 2 * NUM_TOKENS), others=st.integers(LEAST, NUM_TOKENS))
    def grow(self, to_come: int, others: int) -> None:
        before = self.cache.growing.extent()
        self.cache.demand.others = max(others, before.served_tokens)
        self.cache.grow(to_come)
        after = self.cache.growing.extent()
        assert after.mapped_tokens >= max(before.mapped_tokens, after.needed_tokens)
        assert after.served_tokens == max(before.served_tokens, min(after.mapped_tokens, self.cache.demand.others))
        # No more than the parts that are needed.
        assert after.mapped_tokens < max(before.mapped_tokens + 1, LEAST + 1, after.needed_tokens + MOST_SPARE)
        if self.cache.demand.others == NUM_TOKENS:
            assert self.cache.slots.available_size() >= min(to_come, NUM_TOKENS - self.cache.slots.num_in_use)

    @rule(to_come=st.integers(0, 2 * NUM_TOKENS))
    def shrink(self, to_come: int) -> None:
        served, before = self.cache.growing.extent().served_tokens, self.cache.mapped_bytes()
        given_back = self.cache.shrink(to_come)
        assert self.cache.mapped_bytes() == before - given_back
        after = self.cache.growing.extent()
        assert min(served, after.needed_tokens) <= after.served_tokens < max(LEAST + 1, after.needed_tokens + MOST_SPARE)
        # A running request is never pushed out to make room for itself.
        if served >= after.needed_tokens:
            assert self.cache.slots.available_size() >= min(to_come, NUM_TOKENS - self.cache.slots.num_in_use)

    @rule()
    def sleep_and_wake(self) -> None:
        self.cache.held.clear()
        self.cache.slots.clear()
        self.cache.allocator.pause([KV])
        self.cache.growing.reset()
        self.cache.allocator.resume([KV])
        whole = self.cache.allocator.arena(KV).usage().total_bytes
        assert self.cache.mapped_bytes() == whole - self.cache.growing.following_bytes

    @invariant()
    def what_requests_hold_is_there(self) -> None:
        for slots in self.cache.held:
            for number, buffer in enumerate(self.cache.buffers):
                assert torch.equal(buffer[slots], (slots[:, None] + number).to(torch.uint8).expand(-1, ROW))

    @invariant()
    def every_slot_is_counted_once(self) -> None:
        num_held = sum(len(slots) for slots in self.cache.held)
        assert EverySlot(self.cache.slots).available_size() + num_held == NUM_TOKENS
        taken = torch.cat([*self.cache.held, torch.zeros(1, dtype=torch.int64)])
        assert len(torch.unique(taken)) == num_held + 1
        assert self.cache.slots.num_in_use == num_held
        assert self.cache.slots.end_of_use() == (int(taken.max()) // self.page_size + 1) * self.page_size

    @invariant()
    def nothing_is_given_out_beyond_what_is_served(self) -> None:
        extent = self.cache.growing.extent()
        assert LEAST <= extent.served_tokens <= extent.mapped_tokens <= NUM_TOKENS
        free = self.cache.slots.free_pages
        assert free.numel() == 0 or int(free.max()) * self.page_size < extent.served_tokens + self.page_size

    def teardown(self) -> None:
        self.cache.held.clear()
        self.cache.close()


class PagedRequests(Requests):
    page_size = 8


_EXTENT = settings(max_examples=examples(60), stateful_step_count=25, deadline=None, derandomize=not IS_WHOLE)
TestRequests = Requests.TestCase
TestRequests.settings = _EXTENT
TestPagedRequests = PagedRequests.TestCase
TestPagedRequests.settings = _EXTENT


def test_growth_maps_what_requests_may_need_of_every_buffer_and_low_slots_come_first() -> None:
    cache = Cache(1)
    least = cache.mapped_bytes()
    # 41 rows of 512 bytes in each of four buffers.
    assert least == 4 * 2 * CHUNK
    assert cache.growing.following_bytes == cache.allocator.arena(KV).usage().total_bytes - least
    assert not cache.take(LEAST + 1)
    assert cache.grow(LEAST) == Grown() and cache.demand.num_admitted == 0
    # 112 tokens are seven parts, the first two of which are mapped.
    assert cache.grow(100) == Grown(4 * 2 * CHUNK) and cache.demand.num_admitted == 1
    assert cache.growing.extent().served_tokens == 112
    assert cache.points == ["grow_cache.mapped"] * 5
    assert cache.take(100)
    assert cache.held[0].tolist() == list(range(1, 101))
    assert cache.grow(8) == Grown()
    assert cache.grow(NUM_TOKENS).mapped_bytes == cache.growing.following_bytes - 4 * 2 * CHUNK
    cache.held.clear()
    cache.close()


def test_growth_without_room_serves_the_parts_that_found_some() -> None:
    cache = Cache(1)
    held = totals()
    set_host_budget(held.mapped_bytes + held.kept_bytes + 4 * CHUNK)
    try:
        grown = cache.grow(NUM_TOKENS)
    finally:
        set_host_budget(0)
    assert grown == Grown(4 * CHUNK, lacking_bytes=4 * CHUNK)
    extent = cache.growing.extent()
    assert LEAST < extent.served_tokens == extent.mapped_tokens < extent.needed_tokens == NUM_TOKENS
    assert cache.take(extent.served_tokens) and not cache.take(1)
    cache.held.clear()
    cache.close()


def test_a_rank_that_fails_tells_the_others_before_it_says_so() -> None:
    cache, agreed = Cache(1), list[int]()

    def fewest(num_tokens: int) -> int:
        agreed.append(num_tokens)
        return num_tokens

    def fail(point: str) -> None:
        raise InternalError(point)

    cache.demand.fewest = fewest
    cache.demand.to_come = 100
    with pytest.raises(InternalError, match="grow_cache.mapped"):
        cache.growing.grow(fail)
    assert len(agreed) == 1
    cache.close()


def test_shrinking_gives_back_what_lies_above_the_highest_slot_in_use_and_what_is_to_come() -> None:
    cache = Cache(1)
    cache.grow(NUM_TOKENS)
    assert cache.take(100) and cache.take(100)
    assert cache.shrink(10) > 0
    assert cache.growing.extent().mapped_tokens == 224
    assert cache.slots.available_size() == 24
    cache.slots.free(cache.held.pop())
    assert cache.slots.available_size() == 124
    cache.slots.free(cache.held.pop())
    cache.shrink(0)
    assert cache.growing.extent().mapped_tokens == LEAST == cache.slots.available_size()
    cache.close()


def test_changeovers_leave_no_descriptor_and_no_address() -> None:
    cache = Cache(8)

    def change_over() -> None:
        cache.grow(NUM_TOKENS)
        cache.shrink(0)
        cache.allocator.pause([KV])
        cache.growing.reset()
        cache.allocator.resume([KV])

    def held() -> tuple[int, int, int]:
        return len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines()), cache.mapped_bytes()

    change_over()
    before = held()
    for _ in range(10_000 if IS_WHOLE else 200):
        change_over()
    after = held()
    # Python's own heap may have changed by a few ranges.
    assert (after[0], after[2]) == (before[0], before[2]) and after[1] <= before[1] + 8
    cache.close()


def test_a_cache_that_is_not_made_of_rows_is_refused_by_its_name() -> None:
    class HybridPool: ...

    slots = SimpleNamespace(size=8, page_size=1, get_kvcache=lambda: HybridPool())
    with pytest.raises(InvalidArgument, match="rollout.kv_growth.*HybridPool"):
        growing_cache(Cache(1).allocator.arena(KV), SimpleNamespace(token_to_kv_pool_allocator=slots))
