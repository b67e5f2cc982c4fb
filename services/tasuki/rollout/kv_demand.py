"""What SGLang's scheduler may still ask of the KV cache, and what it has to hear when the cache has grown."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from torch import distributed

# SGLang admits a request only with a page more than it takes, and allocates by whole pages.
SPARE_PAGES = 2
"""Of each request, beside its tokens."""


class SchedulerDemand:
    """The demand of one rank's scheduler, between two batches. Ranks of a replica have the same."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def tokens_to_come(self) -> int:
        """That the requests may take beside what they hold: each up to its max_new_tokens, also those that wait."""
        scheduler = self._scheduler
        batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
        requests = [*(request for batch in batches for request in batch.reqs), *scheduler.waiting_queue]
        if scheduler.chunked_req is not None:
            requests.append(scheduler.chunked_req)
        # The last batch may have been merged into the running one, or not yet.
        open_requests = {id(request): request for request in requests if not request.finished()}
        return sum(self._to_come(request) for request in open_requests.values())

    def forget_prefixes(self) -> None:
        """Frees the slots that only cached prefixes hold."""
        prefixes = self._scheduler.tree_cache
        prefixes.evict(EvictParams(num_tokens=prefixes.evictable_size()))

    def fewest(self, num_tokens: int) -> int:
        """The fewest tokens that a rank of the replica names; all of them call this at the same place."""
        group = self._scheduler.tp_cpu_group
        if distributed.get_world_size(group) == 1:
            return num_tokens
        fewest = torch.tensor([num_tokens])
        distributed.all_reduce(fewest, distributed.ReduceOp.MIN, group=group)
        return int(fewest)

    def admit_again(self) -> None:
        """Has the scheduler look at its queue; once the cache was full it would wait for a request to end."""
        self._scheduler.running_batch.batch_is_full = False

    def _to_come(self, request: Any) -> int:
        longest = len(request.origin_input_ids) + request.sampling_params.max_new_tokens
        return max(0, longest - request.kv_allocated_len) + SPARE_PAGES * self._scheduler.page_size
