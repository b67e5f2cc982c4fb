"""SGLang's scheduler, as a rank's commands see it."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from sglang.srt.managers import mm_utils

from tasuki.v1 import ranks_pb2


class RankScheduler:
    def __init__(self, scheduler: Any) -> None:
        """scheduler: SGLang's."""
        self._scheduler = scheduler

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running_batch.reqs)

    def is_idle(self) -> bool:
        return self._scheduler.is_fully_idle()

    def flush(self) -> bool:
        """Evicts every cached prefix and embedding of an image.

        False while a request runs, and until the scheduler has noticed that the last one ended.
        """
        # Prevents SGLang from collecting garbage and emptying torch's cache, which takes longer than everything else.
        if not self._scheduler.flush_cache(empty_cache=False):
            return False
        if mm_utils.embedding_cache is not None:  # of a tower that the next weights may change
            mm_utils.embedding_cache.clear()
        return True

    def forget_slots(self) -> None:
        """Zeroes the map from requests to cache slots, which lies in the cache's region."""
        self._scheduler.req_to_token_pool.req_to_token.zero_()

    def stream(self) -> AbstractContextManager[Any]:
        """The scheduler's, on a GPU."""
        return torch.cuda.stream(self._scheduler.schedule_stream)

    def load(self) -> ranks_pb2.LoadResult:
        num_kv_tokens, _ratio = self._scheduler.pool_stats_observer.get_pool_stats().get_kv_token_stats()
        return ranks_pb2.LoadResult(
            num_running=self.num_running,
            num_queued=len(self._scheduler.waiting_queue),
            num_kv_tokens=max(0, num_kv_tokens),
        )
