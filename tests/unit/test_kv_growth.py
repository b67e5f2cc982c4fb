"""Growth of a KV cache over several ranks: they check when requests may need more than is served, and wait while memory is short."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from tasuki.memory.room_signal import RoomSignal
from tasuki.memory.tags import MemoryTag, MovementKind
from tasuki.rollout.kv_growth import KvExtent, KvGrowth
from tasuki.v1.ranks_pb2 import CacheResult
from tasuki.wire.errors import DeadlineExceeded, TasukiError

NUM_TOKENS, LEAST = 1600, 50


class Room(RoomSignal):
    """Counts the calls it receives."""

    def __init__(self) -> None:
        self.num_requests = self.num_offers = 0

    def request(self) -> None:
        self.num_requests += 1

    def offer(self) -> None:
        self.num_offers += 1


class Ranks:
    """Two replicas of one rank, each with room for some tokens, which behave as GrowingCache."""

    def __init__(self, sizes: Sequence[int] = (NUM_TOKENS, NUM_TOKENS)) -> None:
        self.sizes = sizes
        self.rooms, self.needed = list(sizes), [0 for _ in sizes]
        self.served = [LEAST for _ in sizes]
        self.failure: TasukiError | None = None
        self.num_looks = self.num_shrinks = 0
        self.room = Room()
        self.while_looking: Callable[[], None] = lambda: None
        self.while_shrinking: Callable[[], None] = lambda: None
        self.mapped_bytes = 0
        """Bytes that each rank will have mapped by the next look."""

    async def grow_cache(self) -> list[CacheResult]:
        self.num_looks += 1
        answers = [self._grown(rank) for rank in range(len(self.sizes))]
        for answer in answers:
            answer.mapped_bytes = self.mapped_bytes
        self.mapped_bytes = 0
        self.while_looking()
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return answers

    async def shrink_cache(self) -> list[CacheResult]:
        self.num_shrinks += 1
        self.served = [max(LEAST, needed) for needed in self.needed]
        self.while_shrinking()
        await asyncio.sleep(0)
        return [self._answer(rank, released_bytes=5) for rank in range(len(self.sizes))]

    def _grown(self, rank: int) -> CacheResult:
        goal = min(self.sizes[rank], self.needed[rank])
        self.served[rank] = max(self.served[rank], min(goal, self.rooms[rank]))
        return self._answer(rank, **({"lacking_bytes": 2, "free_bytes": 1} if self.served[rank] < goal else {}))

    def _answer(self, rank: int, **figures: int) -> CacheResult:
        served, size = self.served[rank], self.sizes[rank]
        needed = min(size, self.needed[rank])
        return CacheResult(num_tokens=size, mapped_tokens=served, served_tokens=served, needed_tokens=needed, **figures)


def growth_of(ranks: Ranks, *, stall_s: float = 60.0, failures: list[TasukiError] | None = None) -> KvGrowth:
    return KvGrowth(
        ranks, tp_size=1, stall_s=stall_s, room=ranks.room, on_failure=([] if failures is None else failures).append
    )


async def begun(ranks: Ranks, **settings: float) -> KvGrowth:
    growth = growth_of(ranks, **settings)
    await growth.begin()
    await until(lambda: growth.extent is not None)
    return growth


async def until(is_there: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_there():
            await asyncio.sleep(0.005)


async def test_ranks_look_once_when_requests_may_need_more_than_is_spare() -> None:
    ranks = Ranks()
    growth = await begun(ranks)
    growth.expect(LEAST)
    await asyncio.sleep(0.02)
    assert ranks.num_looks == 1
    ranks.needed = [700, 300]
    growth.expect(1)
    await until(lambda: ranks.served == [700, 300])
    assert ranks.num_looks == 2 and not growth.is_growing
    assert growth.extent == KvExtent(2 * NUM_TOKENS, 1000, 1000, 1000, 0, 0, 0)
    await growth.stop()


async def test_requests_that_come_during_a_look_have_another_one_follow() -> None:
    ranks = Ranks()
    growth = await begun(ranks)

    def more() -> None:
        ranks.while_looking = lambda: None
        ranks.needed = [800, 800]
        growth.expect(400)

    ranks.needed, ranks.while_looking = [400, 400], more
    growth.expect(400)
    await until(lambda: ranks.served == [800, 800])
    await growth.stop()


async def test_a_growth_ends_with_the_bytes_that_it_has_mapped_and_tells_them_once() -> None:
    ranks = Ranks()
    growth = await begun(ranks)
    ranks.needed, ranks.mapped_bytes = [700, 300], 6
    growth.expect(LEAST)
    growth.expect(1)
    await until(lambda: ranks.served == [700, 300])
    await growth.stop()
    await growth.stop()
    (ended,) = growth.take_ended()
    assert (ended.kind, ended.tag, ended.num_bytes) == (MovementKind.GROW, MemoryTag.KV_CACHE, 2 * 6)
    assert ended.seconds > 0 and ended.end_time <= time.time()
    assert growth.take_ended() == ()


async def test_a_whole_cache_is_not_looked_at_again() -> None:
    ranks = Ranks((NUM_TOKENS, 700))
    ranks.needed = [10 * NUM_TOKENS, 10 * NUM_TOKENS]
    growth = await begun(ranks)
    await until(lambda: ranks.served == [NUM_TOKENS, 700])
    num_looks = ranks.num_looks
    growth.expect(NUM_TOKENS)
    await asyncio.sleep(0.05)
    assert (ranks.num_looks, growth.is_growing) == (num_looks, False)
    await growth.stop()


async def test_what_lacks_memory_is_asked_for_until_there_is_some() -> None:
    ranks = Ranks()
    ranks.needed, ranks.rooms[1] = [600, 900], 400
    growth = await begun(ranks, stall_s=0.1)
    assert growth.is_growing and ranks.served == [600, 400] and ranks.room.num_requests > 0
    assert growth.extent is not None and (growth.extent.lacking_bytes, growth.extent.free_bytes) == (2, 1)
    assert not growth.is_stalled
    await until(lambda: growth.is_stalled)
    ranks.rooms[1] = 500
    await until(lambda: not growth.is_stalled)
    assert growth.is_growing
    ranks.rooms[1] = NUM_TOKENS
    await until(lambda: not growth.is_growing)
    assert (ranks.served, growth.is_stalled) == ([600, 900], False)
    num_requests = ranks.room.num_requests
    await asyncio.sleep(0.05)
    assert ranks.room.num_requests == num_requests, "nobody lacks anything"
    await growth.stop()


async def test_growth_that_lacks_memory_ends_with_the_requests_that_needed_it() -> None:
    ranks = Ranks()
    ranks.needed, ranks.rooms = [600, 600], [400, 400]
    growth = await begun(ranks)
    ranks.needed = [300, 300]
    await until(lambda: not growth.is_growing)
    await growth.stop()


async def test_ranks_of_a_replica_count_once_and_what_all_of_them_have_mapped_counts() -> None:
    ranks = [
        CacheResult(num_tokens=100, mapped_tokens=60, served_tokens=40, needed_tokens=50),
        CacheResult(num_tokens=100, mapped_tokens=40, served_tokens=40, needed_tokens=50, lacking_bytes=8, free_bytes=3),
    ]
    other = CacheResult(num_tokens=90, mapped_tokens=90, served_tokens=90, needed_tokens=10)
    assert KvExtent.of([*ranks, other, other], tp_size=2) == KvExtent(190, 130, 130, 60, -10, 8, 3)


async def test_what_leaves_the_ranks_in_an_unknown_state_is_told_once() -> None:
    ranks, failures = Ranks(), list[TasukiError]()
    growth = growth_of(ranks, failures=failures)
    await growth.begin()
    await until(lambda: growth.extent is not None)
    ranks.failure = DeadlineExceeded("no answer", stage="grow_cache")
    growth.expect(2 * LEAST)
    await until(lambda: bool(failures))
    growth.expect(2 * LEAST)
    await growth.stop()
    assert failures == [ranks.failure] and ranks.num_looks == 2


async def test_it_stops_between_two_looks_and_goes_on_from_there() -> None:
    ranks = Ranks()
    ranks.needed, ranks.rooms = [600, 600], [400, 400]
    growth = await begun(ranks)
    await growth.stop()
    num_looks = ranks.num_looks
    ranks.rooms = list(ranks.sizes)
    await asyncio.sleep(0.05)
    assert ranks.num_looks == num_looks
    ranks.needed = [0, 0]
    assert await growth.shrink() == 10
    assert growth.extent is not None and growth.extent.mapped_tokens == 2 * LEAST
    ranks.needed = [600, 600]
    await growth.begin()
    await until(lambda: ranks.served == [600, 600])
    await growth.stop()
    growth.forget()
    assert growth.extent is None and not growth.is_growing


async def test_it_stops_after_a_look_or_release_that_runs() -> None:
    ranks = Ranks()
    stops: list[asyncio.Task[None]] = []

    def stop() -> None:
        ranks.while_looking = lambda: None
        stops.append(asyncio.create_task(growth.stop()))

    growth = await begun(ranks)
    ranks.while_looking = stop
    growth.expect(2 * LEAST)
    await until(lambda: bool(stops) and stops[0].done())
    await growth.begin()
    await until(lambda: growth.extent is not None)
    growth.ended(400)
    ranks.while_shrinking = stop
    growth.is_last_call = True
    growth.ended(50)
    await until(lambda: len(stops) == 2 and stops[1].done())


async def test_ranks_shrink_as_the_requests_of_the_last_call_end() -> None:
    ranks = Ranks()
    growth = await begun(ranks)
    ranks.needed = [1600, 1600]
    growth.is_last_call = True
    growth.expect(3200)
    await until(lambda: ranks.served == [1600, 1600])
    for num_left in range(399, 100, -1):
        growth.ended(num_left)
    await asyncio.sleep(0.02)
    assert ranks.num_shrinks == 0
    ranks.needed = [400, 60]
    growth.ended(99)
    await until(lambda: ranks.served == [400, 60])
    growth.ended(30)
    await asyncio.sleep(0.02)
    assert ranks.num_shrinks == 1
    ranks.needed = [100, 0]
    growth.ended(24)
    await until(lambda: ranks.served == [100, LEAST])
    for num_left in (2, 1, 0):
        growth.ended(num_left)
    await asyncio.sleep(0.02)
    assert ranks.num_shrinks == 2, "nothing is left that PAUSE_KV would wait for"
    await growth.stop()


async def test_a_call_after_the_last_one_grows_the_cache_again() -> None:
    ranks = Ranks()
    ranks.needed = [800, 800]
    growth = await begun(ranks)
    growth.is_last_call = True
    growth.ended(400)
    ranks.needed = [100, 100]
    growth.ended(50)
    assert ranks.room.num_offers == 0
    await until(lambda: ranks.num_shrinks == 1)
    assert ranks.room.num_offers == 1, "the trainer's state may return to what has been released"
    growth.is_last_call = False
    ranks.needed, ranks.rooms = [900, 900], [300, 300]
    growth.expect(1600)
    await until(lambda: growth.is_growing and ranks.room.num_requests > 0)
    ranks.rooms = list(ranks.sizes)
    await until(lambda: ranks.served == [900, 900])
    for num_left in range(300, 0, -1):
        growth.ended(num_left)
    await asyncio.sleep(0.02)
    assert ranks.num_shrinks == 1
    await growth.stop()


async def test_a_growth_after_a_release_counts_only_what_is_mapped_beyond_the_most_before() -> None:
    ranks = Ranks()
    ranks.needed = [800, 800]
    growth = await begun(ranks)
    for num_shrinks, mapped_bytes in ((1, 20), (2, 5), (3, 6)):
        growth.is_last_call = False
        ranks.needed, ranks.mapped_bytes = [900, 900], mapped_bytes
        growth.expect(3200)
        await until(lambda: ranks.served == [900, 900])
        growth.is_last_call = True
        growth.ended(400)
        ranks.needed = [100, 100]
        growth.ended(50)
        await until(lambda expected=num_shrinks: ranks.num_shrinks == expected)
    await growth.stop()
    (ended,) = growth.take_ended()
    # Both ranks map 20, release 5, map 5, release 5 and map 6.
    assert ended.num_bytes == 2 * (20 - 5 + 5 - 5 + 6)


async def test_requests_that_come_while_ranks_shrink_have_them_look_again() -> None:
    class BusyRanks(Ranks):
        async def shrink_cache(self) -> list[CacheResult]:
            answers = await super().shrink_cache()
            self.needed = [700, 700]
            growth.expect(1400)
            return answers

    ranks = BusyRanks()
    ranks.needed = [800, 800]
    growth = await begun(ranks)
    growth.is_last_call = True
    growth.ended(400)
    ranks.needed = [100, 100]
    growth.ended(50)
    await until(lambda: ranks.num_shrinks == 1 and ranks.served == [700, 700])
    await growth.stop()


async def test_an_engine_that_ends_does_not_wait_for_a_look_without_an_answer() -> None:
    class SilentRanks(Ranks):
        async def grow_cache(self) -> list[CacheResult]:
            await asyncio.Event().wait()
            return []

    growth = growth_of(SilentRanks())
    await growth.begin()
    await asyncio.sleep(0)
    await asyncio.wait_for(growth.close(), timeout=60)
