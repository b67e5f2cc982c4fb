"""Maps the rest of the KV cache behind RESUME_KV, while tokens are generated."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tasuki.v1.ranks_pb2 import CacheResult
from tasuki.wire.errors import OutOfGpuMemory, TasukiError

NUM_STEPS = 16
"""Parts in which a cache grows. Generation waits for the pages of one at a time."""
_POLL_S = 0.02
_log = logging.getLogger(__name__)


class CacheCalls(Protocol):
    """What grows and shrinks the cache of every rank."""

    async def grow_cache(self, *, served_tokens: int, mapped_tokens: int) -> Sequence[CacheResult]: ...

    async def shrink_cache(self) -> Sequence[CacheResult]: ...


@dataclass(frozen=True, slots=True)
class KvExtent:
    """Tokens of the KV caches of all replicas, by the rank that has fewest."""

    num_tokens: int
    mapped_tokens: int
    served_tokens: int

    @classmethod
    def of(cls, answers: Sequence[CacheResult]) -> KvExtent:
        """A cache that is whole counts as much as the largest, since nothing more can come of it."""
        whole = max(answer.num_tokens for answer in answers)
        return cls(
            num_tokens=whole,
            mapped_tokens=min(whole if one.mapped_tokens == one.num_tokens else one.mapped_tokens for one in answers),
            served_tokens=min(whole if one.served_tokens == one.num_tokens else one.served_tokens for one in answers),
        )

    @property
    def is_whole(self) -> bool:
        return self.served_tokens == self.num_tokens


class KvGrowth:
    """The growth of one engine's KV cache. All ranks serve a step only after every rank has mapped it.

    stall_s: without progress for so long, growth counts as stalled: it is told, and goes on. on_failure: gets what left the ranks in an
    unknown state; a mere lack of memory does not.
    """

    def __init__(self, calls: CacheCalls, *, stall_s: float, on_failure: Callable[[TasukiError], None]) -> None:
        self._calls, self._stall_s, self._on_failure = calls, stall_s, on_failure
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self.extent: KvExtent | None = None
        """None while the cache sleeps, and until the ranks have said it."""
        self.shortage: OutOfGpuMemory | None = None
        """What the last step lacked; None while it had room."""
        self.is_stalled = False

    @property
    def is_growing(self) -> bool:
        return self._task is not None and not self._task.done()

    async def begin(self) -> None:
        """Starts to grow in the background, from what is mapped."""
        await self.stop()
        self.forget()
        self._is_stopping = False
        self._task = asyncio.create_task(self._grow())

    async def stop(self) -> None:
        """Returns when no step is under way and none will come."""
        self._is_stopping = True
        if self._task is not None:
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Ends growth at once, also in the middle of a step; for an engine that ends."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def shrink(self) -> int:
        """Gives back what no request uses; growth must have stopped. Returns the bytes given back over all ranks."""
        assert not self.is_growing
        answers = await self._calls.shrink_cache()
        self.extent = KvExtent.of(answers)
        return sum(answer.released_bytes for answer in answers)

    def forget(self) -> None:
        """The cache sleeps now."""
        self.extent, self.shortage, self.is_stalled = None, None, False

    async def _grow(self) -> None:
        started = progressed = time.monotonic()
        try:
            extent = self.extent = KvExtent.of(await self._calls.grow_cache(served_tokens=0, mapped_tokens=0))
            while not self._is_stopping and not extent.is_whole:
                if grown := await self._step(extent):
                    extent = self.extent = grown
                    progressed, self.is_stalled = time.monotonic(), False
                    continue
                if not self.is_stalled and time.monotonic() - progressed >= self._stall_s:
                    self.is_stalled = True
                    _log.warning("event=kv_growth_stalled seconds=%.1f %s", self._stall_s, self._numbers())
                await asyncio.sleep(_POLL_S)
        except TasukiError as error:
            self._on_failure(error)
            return
        _log.info("event=kv_grown seconds=%.3f %s", time.monotonic() - started, self._numbers())

    async def _step(self, extent: KvExtent) -> KvExtent | None:
        """Serves what all ranks have mapped and maps a part more. None when a rank had no room; others may have mapped theirs."""
        part = -(-extent.num_tokens // NUM_STEPS)
        try:
            answers = await self._calls.grow_cache(
                served_tokens=extent.mapped_tokens, mapped_tokens=min(extent.mapped_tokens + part, extent.num_tokens)
            )
        except OutOfGpuMemory as error:
            self.shortage = error
            return None
        self.shortage = None
        return KvExtent.of(answers)

    def _numbers(self) -> str:
        extent, shortage = self.extent, self.shortage
        numbers = "" if extent is None else f"served_tokens={extent.served_tokens} tokens={extent.num_tokens}"
        if shortage is None:
            return numbers
        return f"{numbers} needed_bytes={shortage.metadata['needed_bytes']} free_bytes={shortage.metadata['free_bytes']}"
