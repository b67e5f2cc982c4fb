"""SGLang's KV cache slot allocators, limited to low slots: those whose pages are mapped.

A page here is SGLang's: `page_size` slots. Page 0 takes the writes of padding and is never allocated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

if TYPE_CHECKING:
    _Allocator = BaseTokenToKVPoolAllocator
else:
    _Allocator = object


class BoundedSlots(_Allocator):
    """Keeps slots above a bound in reserve. Slots above it that are in use stay allocated until freed.

    Reserved slots count as unavailable, so that requests that need them wait in SGLang's queue. All ranks of a replica must get the
    same bound between the same two batches.
    """

    free_pages: torch.Tensor
    release_pages: torch.Tensor
    _reserved: torch.Tensor
    _num_pages_served: int | None = None
    """Includes page 0; None means all."""

    def clear(self) -> None:
        super().clear()  # pyright: ignore[reportAbstractUsage]  SGLang's allocator comes next
        self._reserved = self.free_pages[:0]
        self._reserve()

    def free(self, free_index: torch.Tensor) -> None:
        super().free(free_index)  # pyright: ignore[reportAbstractUsage]
        if self.is_not_in_free_group and self._num_in_use_above():
            self._reserve()

    def serve(self, num_slots: int) -> None:
        """Allows allocation of the first `num_slots` slots, including page 0, lowest free ones first."""
        self._num_pages_served = num_slots // self.page_size
        is_served = self._reserved < self._num_pages_served
        free = torch.cat((self.free_pages, self.release_pages, self._reserved[is_served]))
        self.free_pages, self.release_pages = torch.sort(free).values, self.release_pages[:0]
        self._reserved = self._reserved[~is_served]
        self._reserve()

    @property
    def num_reserved(self) -> int:
        """Slots."""
        return len(self._reserved) * self.page_size

    @property
    def num_in_use(self) -> int:
        """Allocated slots, without page 0; cached prefixes count."""
        return self.size - int(self.available_size()) - self.num_reserved

    def end_of_use(self) -> int:
        """End of the highest slot in use, including page 0."""
        is_used = torch.ones(self._num_pages + 1, dtype=torch.bool, device=self.free_pages.device)
        for pages in (self.free_pages, self.release_pages, self._reserved):
            is_used[pages] = False
        return (int(is_used.nonzero().max()) + 1) * self.page_size

    @property
    def _num_pages(self) -> int:
        return self.size // self.page_size

    def _num_in_use_above(self) -> int:
        if self._num_pages_served is None:
            return 0
        return max(0, self._num_pages + 1 - self._num_pages_served) - len(self._reserved)

    def _reserve(self) -> None:
        if self._num_pages_served is None:
            return
        for name in ("free_pages", "release_pages"):
            pages = getattr(self, name)
            is_above = pages >= self._num_pages_served
            self._reserved = torch.cat((self._reserved, pages[is_above]))
            setattr(self, name, pages[~is_above])


class BoundedTokenSlots(BoundedSlots, TokenToKVPoolAllocator):
    """Allocates single slots."""


class BoundedPagedSlots(BoundedSlots, PagedTokenToKVPoolAllocator):
    """Allocates slots by pages, for attention kernels that require it."""


class EverySlot:
    """The allocator as seen by SGLang's accounting of the cache: reserved slots are unused."""

    def __init__(self, slots: BoundedSlots) -> None:
        self._slots = slots

    def available_size(self) -> int:
        return int(self._slots.available_size()) + self._slots.num_reserved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slots, name)
