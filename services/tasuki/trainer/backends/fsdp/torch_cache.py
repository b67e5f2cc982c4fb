"""Blocks that torch caches for later tensors, which no other process can use."""

from __future__ import annotations

import gc
import logging

import torch

from tasuki.memory.device_usage import torch_pool

MAX_TRIES, ENOUGH_BYTES = 3, 10**9
# Of the size of a tensor that a round places elsewhere.
_STEP_BYTES = 10**8
_log = logging.getLogger("tasuki.trainer")


class TorchCache:
    """Blocks of one GPU's torch, returned at one place of a changeover."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stuck_bytes = 0
        """Least that is known to stay after all tries: parts of segments in which a tensor lives."""

    def return_blocks(self) -> int:
        """Returns blocks to the driver, in at most MAX_TRIES tries, until less than ENOUGH_BYTES is reserved but unallocated. Returns that.

        A further try first frees tensors in reference cycles, and waits for streams that still use a block. Collecting is slow, so there is
        no such try for what earlier calls could not return either.
        """
        cached = 0
        for number in range(MAX_TRIES):
            if number:
                gc.collect()
                torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            reserved, allocated = torch_pool(self._device.index or 0)
            cached = reserved - allocated
            if cached < max(ENOUGH_BYTES, self._stuck_bytes + _STEP_BYTES):
                self._stuck_bytes = min(self._stuck_bytes, cached)
                return cached
        self._stuck_bytes = cached
        _log.warning("event=cache_kept bytes=%d tries=%d", cached, MAX_TRIES)
        return cached
