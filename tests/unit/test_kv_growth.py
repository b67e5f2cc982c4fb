"""The growth of a KV cache over several ranks: nobody serves what a rank has not mapped, and lack of memory is waited out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tasuki.rollout.kv_growth import NUM_STEPS, KvGrowth
from tasuki.v1.ranks_pb2 import CacheResult
from tasuki.wire.errors import DeadlineExceeded, OutOfGpuMemory, TasukiError

NUM_TOKENS, LEAST = 1600, 50


class Ranks:
    """Two ranks with a room each, in tokens; as GrowingCache does."""

    def __init__(self, sizes: Sequence[int] = (NUM_TOKENS, NUM_TOKENS)) -> None:
        self.sizes = sizes
        self.rooms = list(sizes)
        self.mapped, self.served = [LEAST] * len(sizes), [LEAST] * len(sizes)
        self.failure: TasukiError | None = None
        self.num_calls = 0

    async def grow_cache(self, *, served_tokens: int, mapped_tokens: int) -> list[CacheResult]:
        self.num_calls += 1
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        lacking = False
        for rank, size in enumerate(self.sizes):
            served = min(max(self.served[rank], served_tokens), self.mapped[rank])
            partial = [mapped for mapped, whole in zip(self.mapped, self.sizes, strict=True) if mapped < whole]
            assert served in (self.served[rank], size) or served <= min(partial), "a rank serves what another has not mapped"
            self.served[rank] = served
            mapped = min(max(self.mapped[rank], mapped_tokens), size)
            lacking = lacking or mapped > self.rooms[rank]
            self.mapped[rank] = mapped if mapped <= self.rooms[rank] else self.mapped[rank]
        if lacking:
            raise OutOfGpuMemory("full", needed_bytes=2, free_bytes=1)
        return self._answers()

    async def shrink_cache(self) -> list[CacheResult]:
        self.served = [LEAST for _ in self.sizes]
        self.mapped = [LEAST for _ in self.sizes]
        return self._answers()

    def _answers(self) -> list[CacheResult]:
        return [
            CacheResult(num_tokens=size, mapped_tokens=mapped, served_tokens=served, released_bytes=5)
            for size, mapped, served in zip(self.sizes, self.mapped, self.served, strict=True)
        ]


def growth_of(ranks: Ranks, *, stall_s: float = 60.0, failures: list[TasukiError] | None = None) -> KvGrowth:
    return KvGrowth(ranks, stall_s=stall_s, on_failure=([] if failures is None else failures).append)


async def until(is_there: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_there():
            await asyncio.sleep(0.005)


async def test_all_ranks_serve_the_whole_cache_in_the_end() -> None:
    ranks = Ranks()
    growth = growth_of(ranks)
    await growth.begin()
    await until(lambda: not growth.is_growing)
    assert ranks.served == ranks.mapped == [NUM_TOKENS] * 2
    # The question, a part in each step but the last, which serves alone.
    assert ranks.num_calls <= NUM_STEPS + 2
    assert growth.extent is not None and growth.extent.is_whole


async def test_replicas_with_caches_of_different_sizes_grow_to_theirs() -> None:
    ranks = Ranks((NUM_TOKENS, 700))
    growth = growth_of(ranks)
    await growth.begin()
    await until(lambda: not growth.is_growing)
    assert ranks.served == [NUM_TOKENS, 700]


async def test_no_rank_serves_more_while_one_lacks_room() -> None:
    ranks = Ranks()
    ranks.rooms[1] = 400
    growth = growth_of(ranks)
    await growth.begin()
    await until(lambda: growth.shortage is not None)
    assert growth.is_growing and max(ranks.served) <= 400 < ranks.mapped[0]
    ranks.rooms[1] = NUM_TOKENS
    await until(lambda: not growth.is_growing)
    assert growth.shortage is None and ranks.served == [NUM_TOKENS] * 2


async def test_growth_without_progress_is_stalled_until_there_is_some() -> None:
    ranks = Ranks()
    ranks.rooms = [LEAST, LEAST]
    growth = growth_of(ranks, stall_s=0.1)
    await growth.begin()
    assert not growth.is_stalled
    await until(lambda: growth.is_stalled)
    ranks.rooms = list(ranks.sizes)
    await until(lambda: not growth.is_growing)
    assert not growth.is_stalled


async def test_what_leaves_the_ranks_in_an_unknown_state_is_told_once() -> None:
    ranks, failures = Ranks(), list[TasukiError]()
    ranks.rooms[0] = 400
    growth = growth_of(ranks, failures=failures)
    await growth.begin()
    await until(lambda: growth.shortage is not None)
    ranks.failure = DeadlineExceeded("no answer", stage="grow_cache")
    await until(lambda: not growth.is_growing)
    assert failures == [ranks.failure]


async def test_it_stops_between_two_steps_and_goes_on_from_there() -> None:
    ranks = Ranks()
    ranks.rooms = [400, 400]
    growth = growth_of(ranks)
    await growth.begin()
    await until(lambda: growth.shortage is not None)
    await growth.stop()
    num_calls = ranks.num_calls
    ranks.rooms = list(ranks.sizes)
    await asyncio.sleep(0.05)
    assert (growth.is_growing, ranks.num_calls) == (False, num_calls)
    assert await growth.shrink() == 10
    assert growth.extent is not None and growth.extent.mapped_tokens == LEAST
    await growth.begin()
    await until(lambda: not growth.is_growing)
    assert ranks.served == [NUM_TOKENS] * 2
    growth.forget()
    assert growth.extent is None


async def test_an_engine_that_ends_does_not_wait_for_a_step_without_an_answer() -> None:
    class SilentRanks(Ranks):
        async def grow_cache(self, *, served_tokens: int, mapped_tokens: int) -> list[CacheResult]:
            await asyncio.Event().wait()
            return []

    growth = growth_of(SilentRanks())
    await growth.begin()
    assert growth.is_growing
    await asyncio.wait_for(growth.close(), timeout=60)
    assert not growth.is_growing
