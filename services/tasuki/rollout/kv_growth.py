"""Maps the KV cache that requests need behind RESUME_KV, and gives it back as the last of them end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tasuki.v1.ranks_pb2 import CacheResult
from tasuki.wire.errors import TasukiError

_POLL_S = 0.02
_log = logging.getLogger(__name__)


class CacheCalls(Protocol):
    """What grows and shrinks the cache of every rank."""

    async def grow_cache(self) -> Sequence[CacheResult]: ...

    async def shrink_cache(self) -> Sequence[CacheResult]: ...


@dataclass(frozen=True, slots=True)
class KvExtent:
    """Tokens of the KV caches of all replicas."""

    num_tokens: int
    mapped_tokens: int
    served_tokens: int
    needed_tokens: int
    spare_tokens: int
    """Served beside what is needed, of the replica that has fewest; below 0 while one lacks memory."""
    lacking_bytes: int
    """That a rank needed for the next part, and did not find; 0 when all had room."""
    free_bytes: int

    @classmethod
    def of(cls, answers: Sequence[CacheResult], *, tp_size: int) -> KvExtent:
        """answers: of all ranks, those of the first replica first."""
        replicas = [answers[first : first + tp_size] for first in range(0, len(answers), tp_size)]
        short = max(answers, key=lambda answer: answer.lacking_bytes)
        return cls(
            num_tokens=sum(ranks[0].num_tokens for ranks in replicas),
            mapped_tokens=sum(min(rank.mapped_tokens for rank in ranks) for ranks in replicas),
            served_tokens=sum(ranks[0].served_tokens for ranks in replicas),
            needed_tokens=sum(ranks[0].needed_tokens for ranks in replicas),
            spare_tokens=min(ranks[0].served_tokens - ranks[0].needed_tokens for ranks in replicas),
            lacking_bytes=short.lacking_bytes,
            free_bytes=short.free_bytes,
        )

    @property
    def is_whole(self) -> bool:
        return self.served_tokens == self.num_tokens


class KvGrowth:
    """The growth of one engine's KV cache. Ranks look at what their requests may need when the engine gets more than there is room for.

    stall_s: without memory for so long, growth counts as stalled: it is told, and goes on. on_failure: gets what left the ranks in an
    unknown state; a mere lack of memory does not.
    """

    def __init__(self, calls: CacheCalls, *, tp_size: int, stall_s: float, on_failure: Callable[[TasukiError], None]) -> None:
        self._calls, self._tp_size, self._stall_s, self._on_failure = calls, tp_size, stall_s, on_failure
        self._task: asyncio.Task[None] | None = None
        self._is_due, self._is_stopping = asyncio.Event(), False
        self._num_coming = 0
        self.extent: KvExtent | None = None
        """None while the cache sleeps, and until the ranks have said it."""
        self.is_stalled = False

    @property
    def is_growing(self) -> bool:
        """Whether requests may need what could not be mapped yet."""
        return self.extent is not None and self.extent.spare_tokens < 0

    async def begin(self) -> None:
        """Grows in the background as requests come, from what is mapped."""
        await self.stop()
        self.forget()
        self._is_stopping = False
        self._is_due.clear()
        self._task = asyncio.create_task(self._grow_for_ever())

    def expect(self, num_tokens: int) -> None:
        """The engine has got requests that may take so many tokens, all of them on one replica."""
        self._num_coming += num_tokens
        if self._lacks_room():
            self._is_due.set()

    async def stop(self) -> None:
        """Returns when no command is under way and none will come."""
        self._is_stopping = True
        self._is_due.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Ends growth at once, also in the middle of a command; for an engine that ends."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def shrink(self) -> int:
        """Gives back what no request can need; growth must have stopped. Returns the bytes given back over all ranks."""
        assert self._task is None or self._task.done()
        answers = await self._calls.shrink_cache()
        self.extent = KvExtent.of(answers, tp_size=self._tp_size)
        return sum(answer.released_bytes for answer in answers)

    def forget(self) -> None:
        """The cache sleeps now."""
        self.extent, self.is_stalled = None, False

    def _lacks_room(self) -> bool:
        """Whether the ranks must look again: a request that has ended since they did only leaves more."""
        extent = self.extent
        return extent is None or (self._num_coming > extent.spare_tokens and not extent.is_whole)

    async def _grow_for_ever(self) -> None:
        progressed = time.monotonic()
        try:
            while not self._is_stopping:
                before = self.extent
                extent = await self._look()
                if extent.spare_tokens >= 0 or before is None or extent.served_tokens > before.served_tokens:
                    progressed, self.is_stalled = time.monotonic(), False
                if extent.spare_tokens < 0:
                    self._check_progress(extent, seconds=time.monotonic() - progressed)
                    await asyncio.sleep(_POLL_S)
                elif not self._lacks_room():
                    self._is_due.clear()
                    await self._is_due.wait()
        except TasukiError as error:
            self._on_failure(error)

    async def _look(self) -> KvExtent:
        """Has the ranks map what they need. What the engine gets meanwhile may be left out."""
        self._num_coming = 0
        started, before = time.monotonic(), self.extent
        answers = await self._calls.grow_cache()
        extent = self.extent = KvExtent.of(answers, tp_size=self._tp_size)
        if before is not None and extent.served_tokens > before.served_tokens:
            mapped_bytes = sum(answer.mapped_bytes for answer in answers)
            _log.info(
                "event=kv_grown seconds=%.3f mapped_bytes=%d %s", time.monotonic() - started, mapped_bytes, _numbers(extent)
            )
        return extent

    def _check_progress(self, extent: KvExtent, *, seconds: float) -> None:
        if not self.is_stalled and seconds >= self._stall_s:
            self.is_stalled = True
            _log.warning(
                "event=kv_growth_stalled seconds=%.1f needed_bytes=%d free_bytes=%d %s",
                seconds,
                extent.lacking_bytes,
                extent.free_bytes,
                _numbers(extent),
            )


def _numbers(extent: KvExtent) -> str:
    return f"needed_tokens={extent.needed_tokens} served_tokens={extent.served_tokens} tokens={extent.num_tokens}"
