"""The engine's memory as seen by its front: all ranks as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tasuki.memory.tags import MemoryTag
from tasuki.rollout.rank_calls import RankCalls
from tasuki.rpc.usage import joined
from tasuki.v1 import memory_pb2, ranks_pb2
from tasuki.wire.errors import Busy, OutOfGpuMemory

_IDLE_TIMEOUT_S = 5.0
_IDLE_POLL_S = 0.005


class EngineMemory:
    """Memory of all engine ranks by tag; resident when the engine has started. Pause and resume are idempotent and all-or-nothing.

    staying: tags that the ranks do not release. growth_timeout_s: for one command to a growing KV cache.
    """

    def __init__(
        self, calls: RankCalls, *, staying: frozenset[MemoryTag] = frozenset(), growth_timeout_s: float = 600.0
    ) -> None:
        self._calls, self._staying, self._growth_timeout_s = calls, staying, growth_timeout_s
        self._awake = {MemoryTag.WEIGHTS, MemoryTag.KV_CACHE}

    @property
    def resident_tags(self) -> list[MemoryTag]:
        """Tags mapped on every rank."""
        return [tag for tag in (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE) if tag in self._awake]

    async def pause(self, tags: Sequence[MemoryTag], *, timeout_s: float) -> int:
        """Releases the pages of `tags`, along with cached prefixes. Returns the bytes released on all ranks.

        Raises Busy if requests still run after 5 seconds.
        """
        patience = asyncio.get_running_loop().time() + min(timeout_s, _IDLE_TIMEOUT_S)
        while True:
            try:
                answers = await self._calls.pause(tags, timeout_s=timeout_s)
                break
            except Busy:
                # The scheduler may take a moment to notice that its last request has ended.
                if asyncio.get_running_loop().time() > patience:
                    raise
                await asyncio.sleep(_IDLE_POLL_S)
        self._awake -= set(tags) - self._staying
        return sum(answer.released_bytes for answer in answers)

    async def resume(self, tags: Sequence[MemoryTag], *, timeout_s: float) -> int:
        """Maps pages for `tags` at the same addresses. Returns the bytes mapped on all ranks.

        Raises OutOfGpuMemory if a rank has no room; tags paused before are then paused on every rank. After any other error the memory's
        state is unknown.
        """
        try:
            answers = await self._calls.resume(tags, timeout_s=timeout_s)
        except OutOfGpuMemory:
            await self._calls.pause([tag for tag in tags if tag not in self._awake], timeout_s=timeout_s)
            raise
        self._awake |= set(tags)
        return sum(answer.mapped_bytes for answer in answers)

    async def grow_cache(self) -> Sequence[ranks_pb2.CacheResult]:
        """Maps and serves the KV cache that requests may need, while there is room."""
        return await self._calls.grow_cache(timeout_s=self._growth_timeout_s)

    async def shrink_cache(self) -> Sequence[ranks_pb2.CacheResult]:
        """Releases the KV cache that no request can need."""
        return await self._calls.shrink_cache(timeout_s=self._growth_timeout_s)

    async def usage(self, *, timeout_s: float) -> memory_pb2.GetUsageResponse:
        """Usage reported by every rank. Raises DeadlineExceeded if they stay busy for longer."""
        answers = await self._calls.usage(timeout_s=timeout_s)
        return joined(answers)
