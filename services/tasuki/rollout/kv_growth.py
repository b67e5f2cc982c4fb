"""Grows the KV cache after RESUME_KV as requests need it, and shrinks it as the last of a phase end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tasuki.memory.room_signal import RoomSignal
from tasuki.memory.tags import MemoryTag, Movement, MovementKind
from tasuki.v1.ranks_pb2 import CacheResult
from tasuki.wire.errors import TasukiError

_POLL_S = 0.02
_TAIL_SHARE = 4
"""The cache shrinks when this part of the requests of the last call is left, and again with this part of those."""
_log = logging.getLogger(__name__)


class CacheCalls(Protocol):
    """Commands that grow and shrink the cache on every rank."""

    async def grow_cache(self) -> Sequence[CacheResult]: ...

    async def shrink_cache(self) -> Sequence[CacheResult]: ...


@dataclass(frozen=True, slots=True)
class KvExtent:
    """Sizes of the KV caches of all replicas, in tokens."""

    num_tokens: int
    mapped_tokens: int
    served_tokens: int
    needed_tokens: int
    spare_tokens: int
    """Tokens served beyond the need, on the replica with the fewest; negative while one lacks memory."""
    lacking_bytes: int
    """Bytes that a rank needed for the next part but did not find; 0 if all had room."""
    free_bytes: int

    @classmethod
    def of(cls, answers: Sequence[CacheResult], *, tp_size: int) -> KvExtent:
        """answers: of all ranks, ordered by replica."""
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
    """Growth of one engine's KV cache. Ranks check what their requests may need when the engine gets more than fits.

    stall_s: after this long without memory, growth is reported as stalled, and continues. room: requested while memory lacks, offered
    once the cache has shrunk. on_failure: called with errors that leave the ranks in an unknown state; a mere lack of memory does not.
    """

    def __init__(
        self,
        calls: CacheCalls,
        *,
        tp_size: int,
        stall_s: float,
        room: RoomSignal,
        on_failure: Callable[[TasukiError], None],
    ) -> None:
        self._calls, self._tp_size, self._stall_s = calls, tp_size, stall_s
        self._room, self._on_failure = room, on_failure
        self._task: asyncio.Task[None] | None = None
        self._is_due, self._is_stopping = asyncio.Event(), False
        self._num_coming = 0
        self.is_last_call = False
        """Whether the newest call said that none follows before phase TRAIN."""
        self._num_left = self._most_left = 0
        self.extent: KvExtent | None = None
        """None while the cache is paused and until the ranks have reported."""
        self.is_stalled = False
        self._grown_bytes = self._most_grown_bytes = 0
        """Bytes mapped beyond those of RESUME_KV: now, less what was released, and at most so far."""
        self._grown_s = 0.0
        self._ended: list[Movement] = []

    @property
    def is_growing(self) -> bool:
        """Whether requests may need more than could be mapped so far."""
        return self.extent is not None and self.extent.spare_tokens < 0

    async def begin(self) -> None:
        """Starts background growth from what is mapped."""
        await self.stop()
        self.forget()
        self._is_stopping = self.is_last_call = False
        self._num_left = self._most_left = 0
        self._grown_bytes = self._most_grown_bytes = 0
        self._grown_s = 0.0
        self._is_due.clear()
        self._task = asyncio.create_task(self._grow_for_ever())

    def expect(self, num_tokens: int) -> None:
        """Records submitted requests that may need this many tokens, in the worst case all on one replica."""
        self._num_coming += num_tokens
        if self._lacks_room():
            self._is_due.set()

    def ended(self, num_left: int) -> None:
        """Records that a request has ended. num_left: requests in the engine; no others wait."""
        self._num_left, self._most_left = num_left, max(self._most_left, num_left)
        if self._is_tail:
            self._is_due.set()

    async def stop(self) -> None:
        """Waits until no command is running and none will follow."""
        self._is_stopping = True
        self._is_due.set()
        if self._task is not None:
            await asyncio.wait([self._task])
            self._task = None
            self._ended.append(
                Movement(MovementKind.GROW, MemoryTag.KV_CACHE, self._most_grown_bytes, self._grown_s, time.time())
            )

    def take_ended(self) -> tuple[Movement, ...]:
        """Growths that have ended since the last call: the most bytes by which all ranks grew, and how long commands mapped them."""
        ended, self._ended = tuple(self._ended), []
        return ended

    async def close(self) -> None:
        """Stops growth immediately, even during a command; for an engine that is ending."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def shrink(self) -> int:
        """Releases what no request can need; growth must have stopped. Returns the bytes released on all ranks."""
        assert self._task is None
        _, released_bytes = await self._shrink()
        return released_bytes

    def forget(self) -> None:
        """Resets the state when the cache is paused."""
        self.extent, self.is_stalled = None, False

    def _lacks_room(self) -> bool:
        """Whether ranks must check again. Requests that ended since the last check only leave more room."""
        extent = self.extent
        return extent is None or (self._num_coming > extent.spare_tokens and not extent.is_whole)

    @property
    def _is_tail(self) -> bool:
        """Whether so few requests of the last call are left that their cache is worth shrinking. Without any PAUSE_KV is near."""
        return self.is_last_call and 0 < self._num_left <= self._most_left // _TAIL_SHARE

    async def _grow_for_ever(self) -> None:
        progressed = time.monotonic()
        try:
            while not self._is_stopping:
                before = self.extent
                extent = await (self._release() if self._is_tail else self._look())
                if extent.spare_tokens >= 0 or before is None or extent.served_tokens > before.served_tokens:
                    progressed, self.is_stalled = time.monotonic(), False
                if extent.spare_tokens < 0:
                    self._room.request()
                    self._check_progress(extent, seconds=time.monotonic() - progressed)
                    await asyncio.sleep(_POLL_S)
                elif not (self._is_stopping or self._lacks_room() or self._is_tail):
                    self._is_due.clear()
                    await self._is_due.wait()
        except TasukiError as error:
            self._on_failure(error)

    async def _release(self) -> KvExtent:
        """Makes the ranks release what the last requests cannot need. Requests submitted meanwhile make them look again."""
        self._num_coming, self._most_left = 0, self._num_left
        started = time.monotonic()
        extent, released_bytes = await self._shrink()
        _log.info(
            "event=kv_shrunk seconds=%.3f released_bytes=%d %s", time.monotonic() - started, released_bytes, _numbers(extent)
        )
        return extent

    async def _shrink(self) -> tuple[KvExtent, int]:
        answers = await self._calls.shrink_cache()
        extent = self.extent = KvExtent.of(answers, tp_size=self._tp_size)
        self._room.offer()
        released_bytes = sum(answer.released_bytes for answer in answers)
        self._grown_bytes -= released_bytes
        return extent, released_bytes

    async def _look(self) -> KvExtent:
        """Makes the ranks map what they need. Requests submitted meanwhile may be missed."""
        self._num_coming = 0
        started, before = time.monotonic(), self.extent
        answers = await self._calls.grow_cache()
        extent = self.extent = KvExtent.of(answers, tp_size=self._tp_size)
        mapped_bytes = sum(answer.mapped_bytes for answer in answers)
        if mapped_bytes:
            self._grown_bytes += mapped_bytes
            self._most_grown_bytes = max(self._most_grown_bytes, self._grown_bytes)
            self._grown_s += time.monotonic() - started
        if before is not None and extent.served_tokens > before.served_tokens:
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
