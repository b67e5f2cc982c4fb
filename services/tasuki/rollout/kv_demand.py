"""KV cache demand of SGLang's scheduler, and what to tell it after the cache has grown."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from torch import distributed

# SGLang admits a request only if a page more than it needs is free, and allocates whole pages.
SPARE_PAGES = 2
"""Extra tokens per request."""


class SchedulerDemand:
    """Demand of one rank's scheduler, between two batches. Equal on the ranks of a replica."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def tokens_to_come(self) -> int:
        """Tokens that requests, including waiting ones, may need beyond what they hold: each up to its max_new_tokens."""
        scheduler = self._scheduler
        batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
        requests = [*(request for batch in batches for request in batch.reqs), *scheduler.waiting_queue]
        if scheduler.chunked_req is not None:
            requests.append(scheduler.chunked_req)
        # The last batch may not have been merged into the running one yet.
        open_requests = {id(request): request for request in requests if not request.finished()}
        return sum(self._to_come(request) for request in open_requests.values())

    def forget_prefixes(self) -> None:
        """Frees slots held only by cached prefixes."""
        prefixes = self._scheduler.tree_cache
        prefixes.evict(EvictParams(num_tokens=prefixes.evictable_size()))

    def fewest(self, num_tokens: int) -> int:
        """The minimum over the replica's ranks, all of which call this at the same point."""
        group = self._scheduler.tp_cpu_group
        if distributed.get_world_size(group) == 1:
            return num_tokens
        fewest = torch.tensor([num_tokens])
        distributed.all_reduce(fewest, distributed.ReduceOp.MIN, group=group)
        return int(fewest)

    def admit_again(self) -> None:
        """Makes the scheduler check its queue; after a full cache it would wait for a request to end."""
        self._scheduler.running_batch.batch_is_full = False

    def _to_come(self, request: Any) -> int:
        longest = len(request.origin_input_ids) + request.sampling_params.max_new_tokens
        return max(0, longest - request.kv_allocated_len) + SPARE_PAGES * self._scheduler.page_size
