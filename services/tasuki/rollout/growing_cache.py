"""A partly mapped KV cache on one engine rank: the first slots of every layer's keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch

from tasuki.memory.arena import Arena
from tasuki.rollout.kv_demand import SchedulerDemand
from tasuki.rollout.kv_slots import BoundedSlots
from tasuki.wire.errors import InvalidArgument, OutOfGpuMemory

NUM_PARTS = 16
"""Tokens per part of a cache; the served tokens end at a part's end."""
SPARE_SHARE = 4
"""Minimum share of a part that a growth leaves spare, so that ranks need not check again for every new request."""


class Demand(Protocol):
    """Cache tokens that a rank's scheduler may still need; see SchedulerDemand."""

    def tokens_to_come(self) -> int: ...

    def forget_prefixes(self) -> None: ...

    def fewest(self, num_tokens: int) -> int: ...

    def admit_again(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CacheExtent:
    """Sizes of a rank's KV cache in tokens."""

    num_tokens: int
    """Capacity when fully mapped."""
    mapped_tokens: int
    served_tokens: int
    """Tokens available to requests; at most those mapped."""
    needed_tokens: int
    """Tokens in use by requests or as prefixes, or that requests may still need; at most the capacity."""


@dataclass(frozen=True, slots=True)
class Grown:
    """Result of one growth, in bytes of one rank."""

    mapped_bytes: int = 0
    lacking_bytes: int = 0
    """Bytes that the next part needed but did not find; 0 if there was room."""
    free_bytes: int = 0


class GrowingCache:
    """The KV cache of a rank: how much is mapped, and which slots may be allocated.

    Each buffer holds one layer's keys or values, one row per slot, so that the first slots are a prefix of every buffer. The arena maps
    the chunks of that prefix. While there is room, the served tokens cover what is in use and what requests may still need.
    """

    def __init__(
        self, arena: Arena, slots: BoundedSlots, buffers: Sequence[torch.Tensor], *, least_tokens: int, demand: Demand
    ) -> None:
        """least_tokens: minimum to serve, enough for the longest request. Releases everything beyond it immediately.

        buffers: [slot, ...] each.
        """
        self._arena, self._slots, self._buffers, self._demand = arena, slots, buffers, demand
        self._least_tokens = min(least_tokens, slots.size)
        num_pages = slots.size // slots.page_size
        self._part_tokens = -(-num_pages // NUM_PARTS) * slots.page_size
        self._mapped_tokens = self._served_tokens = slots.size
        self.following_bytes = 0
        """Bytes of the whole cache that a resume leaves to be mapped later."""
        self.following_bytes = self.reset()

    def reset(self) -> int:
        """Reduces the cache to the minimum before a resume. Returns the bytes released; 0 while the cache is paused.

        Requires that no request is running.
        """
        self._serve(self._least_tokens)
        _, given_back = self._map(self._least_tokens)
        return given_back

    @property
    def addresses(self) -> frozenset[int]:
        """Address of each buffer's first byte."""
        return frozenset(buffer.data_ptr() for buffer in self._buffers)

    def extent(self) -> CacheExtent:
        needed = min(self._slots.size, self._slots.num_in_use + self._demand.tokens_to_come())
        return CacheExtent(self._slots.size, self._mapped_tokens, self._served_tokens, needed)

    def grow(self, reached: Callable[[str], None]) -> Grown:
        """Maps what is needed, part by part while there is room, and serves what all ranks of the replica have mapped.

        reached: called with a failpoint's name after each part.
        """
        grown = Grown()
        try:
            goal = self._goal()
            while self._mapped_tokens < goal and not grown.lacking_bytes:
                try:
                    mapped_bytes, _ = self._map(min(goal, self._end_of_part(self._mapped_tokens + 1)))
                except OutOfGpuMemory as error:
                    needed, free = (int(error.metadata[name]) for name in ("needed_bytes", "free_bytes"))
                    grown = replace(grown, lacking_bytes=needed, free_bytes=free)
                else:
                    grown = replace(grown, mapped_bytes=grown.mapped_bytes + mapped_bytes)
                    reached("grow_cache.mapped")
        finally:
            # The other ranks wait here, even if this one has failed.
            served = self._demand.fewest(self._mapped_tokens)
        if served > self._served_tokens:
            self._serve(served)
            self._demand.admit_again()
        return grown

    def shrink(self, reached: Callable[[str], None]) -> int:
        """Evicts cached prefixes, serves only what is needed, and releases what lies above it and above every used slot.

        Returns the bytes released.
        """
        self._demand.forget_prefixes()
        self._serve(min(self._goal(), self._served_tokens))
        reached("shrink_cache.served")
        in_use = self._slots.end_of_use() - self._slots.page_size
        _, given_back = self._map(min(max(in_use, self._served_tokens), self._mapped_tokens))
        return given_back

    def _goal(self) -> int:
        """Tokens to serve for the current need."""
        needed = self.extent().needed_tokens
        if needed <= self._least_tokens:
            return self._least_tokens
        return self._end_of_part(needed + self._part_tokens // SPARE_SHARE)

    def _end_of_part(self, num_tokens: int) -> int:
        return min(-(-num_tokens // self._part_tokens) * self._part_tokens, self._slots.size)

    def _serve(self, num_tokens: int) -> None:
        self._slots.serve(num_tokens + self._slots.page_size)
        self._served_tokens = num_tokens

    def _map(self, num_tokens: int) -> tuple[int, int]:
        num_slots = num_tokens + self._slots.page_size
        tails = [buffer[num_slots:] for buffer in self._buffers]
        moved = self._arena.set_idle([(tail.data_ptr(), tail.nbytes) for tail in tails if tail.numel()])
        self._mapped_tokens = num_tokens
        return moved


def growing_cache(arena: Arena, scheduler: Any) -> GrowingCache:
    """Creates the cache for SGLang's scheduler. Raises InvalidArgument if the model's cache does not have one row per slot."""
    slots, pool = scheduler.token_to_kv_pool_allocator, scheduler.token_to_kv_pool_allocator.get_kvcache()
    buffers = [*getattr(pool, "k_buffer", ()), *getattr(pool, "v_buffer", ())]
    rows = slots.size + slots.page_size
    is_plain = isinstance(slots, BoundedSlots) and bool(buffers)
    if not is_plain or any(buffer.shape[0] != rows or not buffer.is_contiguous() for buffer in buffers):
        raise InvalidArgument(
            "rollout.kv_growth", f"= true does not support this model's cache ({type(pool).__name__}); remove it"
        )
    return GrowingCache(
        arena,
        slots,
        buffers,
        least_tokens=cast(int, scheduler.model_config.context_len) + slots.page_size,
        demand=SchedulerDemand(scheduler),
    )
