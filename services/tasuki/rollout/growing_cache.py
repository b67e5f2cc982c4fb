"""One engine rank's KV cache, of which a part is mapped: the first slots of every layer's keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from tasuki.memory.arena import Arena
from tasuki.rollout.kv_slots import BoundedSlots
from tasuki.wire.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class CacheExtent:
    """Tokens of a rank's KV cache."""

    num_tokens: int
    """That it holds when all of it is mapped."""
    mapped_tokens: int
    served_tokens: int
    """That requests may take; no more than are mapped."""


class GrowingCache:
    """The KV cache of a rank: how much of it is mapped, and which slots are given out.

    Every buffer holds one layer's keys or values, a row for each slot, so that the first slots are a prefix of every buffer. The arena maps
    the chunks that a prefix needs.
    """

    def __init__(
        self,
        arena: Arena,
        slots: BoundedSlots,
        buffers: Sequence[torch.Tensor],
        *,
        least_tokens: int,
        forget_prefixes: Callable[[], object],
    ) -> None:
        """least_tokens: without which nothing is served; room for the longest request. Gives back at once what is beyond them.

        buffers: [slot, ...] each. forget_prefixes: frees the slots that only cached prefixes hold.
        """
        self._forget_prefixes = forget_prefixes
        self._arena, self._slots, self._buffers = arena, slots, buffers
        self._least_tokens = min(least_tokens, slots.size)
        self._mapped_tokens = self._served_tokens = slots.size
        self.following_bytes = 0
        """Of the whole cache, what comes after a resume."""
        self.following_bytes = self.reset()

    def reset(self) -> int:
        """Leaves the least tokens to map and to serve, before a resume. Returns the bytes given back, none while the cache sleeps.

        No request runs.
        """
        self._serve(self._least_tokens)
        _, given_back = self._map(self._least_tokens)
        return given_back

    @property
    def addresses(self) -> frozenset[int]:
        """Of every buffer's first byte."""
        return frozenset(buffer.data_ptr() for buffer in self._buffers)

    def extent(self) -> CacheExtent:
        return CacheExtent(self._slots.size, self._mapped_tokens, self._served_tokens)

    def grow(self, *, mapped_tokens: int, served_tokens: int) -> int:
        """Serves tokens that are mapped already, and maps more. Returns the bytes mapped.

        Both are bounded by the cache. Raises OutOfGpuMemory with the pages as they were; what was mapped before is served all the same.
        """
        if served_tokens > self._served_tokens:
            self._serve(min(served_tokens, self._mapped_tokens))
        target = min(max(mapped_tokens, self._mapped_tokens), self._slots.size)
        mapped, _ = self._map(target)
        return mapped

    def shrink(self) -> int:
        """Serves the least tokens, gives back what lies above every slot in use, cached prefixes with it, and returns the bytes."""
        self._forget_prefixes()
        self._serve(min(self._least_tokens, self._served_tokens))
        in_use = self._slots.num_slots_in_use() - self._slots.page_size
        _, given_back = self._map(min(max(in_use, self._served_tokens), self._mapped_tokens))
        return given_back

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
    """Of SGLang's scheduler. Raises InvalidArgument when the model's cache is not made of one row for each slot."""
    slots, pool = scheduler.token_to_kv_pool_allocator, scheduler.token_to_kv_pool_allocator.get_kvcache()
    buffers = [*getattr(pool, "k_buffer", ()), *getattr(pool, "v_buffer", ())]
    rows = slots.size + slots.page_size
    is_plain = isinstance(slots, BoundedSlots) and bool(buffers)
    if not is_plain or any(buffer.shape[0] != rows or not buffer.is_contiguous() for buffer in buffers):
        raise InvalidArgument(
            "rollout.kv_growth", f"= true is not for this model's cache ({type(pool).__name__}); leave it out"
        )
    prefixes = scheduler.tree_cache
    return GrowingCache(
        arena,
        slots,
        buffers,
        least_tokens=cast(int, scheduler.model_config.context_len) + slots.page_size,
        forget_prefixes=lambda: prefixes.evict(EvictParams(num_tokens=prefixes.evictable_size())),
    )
