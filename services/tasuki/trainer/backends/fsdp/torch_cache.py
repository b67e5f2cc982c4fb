"""Blocks that torch caches for later tensors, which no other process can use."""

from __future__ import annotations

import gc
import logging

import torch

from tasuki.memory.device_usage import torch_pool

MAX_TRIES, ENOUGH_BYTES = 3, 10**9
_log = logging.getLogger("tasuki.trainer")


def return_cached_blocks(device: torch.device) -> int:
    """Returns blocks to the driver, in at most MAX_TRIES tries, until less than ENOUGH_BYTES is reserved but unallocated. Returns that.

    A further try first frees tensors in reference cycles, and waits for streams that still use a block.
    """
    cached = 0
    for number in range(MAX_TRIES):
        if number:
            gc.collect()
            torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        reserved, allocated = torch_pool(device.index or 0)
        cached = reserved - allocated
        if cached < ENOUGH_BYTES:
            return cached
    _log.warning("event=cache_kept bytes=%d tries=%d", cached, MAX_TRIES)
    return cached
