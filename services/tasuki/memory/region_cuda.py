"""A region on a GPU: a torch MemPool per tag whose segments come from the tag's arena."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from tasuki.memory.arena import LIBRARY_PATH, NUM_SLOTS, Arena
from tasuki.wire.errors import InvalidArgument


def refuse_expandable_segments() -> None:
    """Refuses expandable segments, with which torch maps pages outside the arenas."""
    # What is in force, however it was set: by either environment variable or at run time.
    snapshot: Any = torch.cuda.memory._snapshot()
    if snapshot["allocator_settings"]["expandable_segments"]:
        raise InvalidArgument(
            "PYTORCH_CUDA_ALLOC_CONF",
            "expandable_segments:True lets torch map memory that cannot be paused; remove it (arenas do not fragment as segments do)",
        )


class CudaRegions:
    """Pools of one device. A pool keeps its freed blocks cached; `close` gives them back."""

    def __init__(self, arenas: list[Arena], *, device: str) -> None:
        if len(arenas) > NUM_SLOTS:
            raise InvalidArgument("tags", f"{len(arenas)} tags, at most {NUM_SLOTS}")
        torch.cuda.init()
        refuse_expandable_segments()
        self._device = torch.device(device).index or 0
        self._pools: dict[str, torch.cuda.MemPool] = {}
        self._allocators: list[torch.cuda.memory.CUDAPluggableAllocator] = []
        for slot, arena in enumerate(arenas):
            arena.bind_slot(slot)
            allocator = torch.cuda.memory.CUDAPluggableAllocator(
                str(LIBRARY_PATH), f"tasuki_torch_alloc_{slot}", "tasuki_torch_free"
            )
            self._allocators.append(allocator)  # the pool holds a bare pointer to it
            with torch.cuda.device(self._device):
                self._pools[arena.tag] = torch.cuda.MemPool(allocator.allocator())

    def region(self, tag: str) -> AbstractContextManager[None]:
        return torch.cuda.use_mem_pool(self._pools[tag], device=self._device)

    def pool(self, tag: str) -> torch.cuda.MemPool:
        """Pool for torch.cuda.graph(pool=...), so that allocations of a capture belong to the tag."""
        return self._pools[tag]

    def blocks(self, tag: str) -> list[tuple[int, int]]:
        """Address and bytes of the pool's blocks in use, without what torch rounded them up by."""
        segments: Any = torch.cuda.memory_snapshot()
        pool = tuple(self._pools[tag].id)
        return [
            (block["address"], block["requested_size"])
            for segment in segments
            if segment["device"] == self._device and tuple(segment["segment_pool_id"]) == pool
            for block in segment["blocks"]
            if block["state"] != "inactive"
        ]

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Gives the pools' segments back to their arenas; those with a live tensor stay."""
        torch._C._cuda_clearCublasWorkspaces()  # torch keeps one for ever, also one that was made inside a region or capture
        self._pools.clear()
        self.empty_cache()
