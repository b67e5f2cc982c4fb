"""Memory of torch's default pool on the node's pool: working memory of a step or batch, and cached segments."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.cuda._utils import _get_device_index

from tasuki.memory.arena import Arena
from tasuki.memory.library import driver_and_index, redirect_cudart
from tasuki.memory.pool import pool_usage
from tasuki.memory.region_cuda import refuse_expandable_segments
from tasuki.wire.errors import InternalError

_PROBE_BYTES = 32 * 2**20


def take_segments_from_pool(device: str) -> Arena:
    """Makes torch take its segments from this process's pool of `device`, a GPU, and give them back with `empty_cache`.

    Call it once, after the pool was joined and before a model is loaded. torch's free memory then includes the pool's. The arena lives
    as long as the process. Raises InternalError where cudaMalloc is not redirected, InvalidArgument for expandable segments.
    """
    torch.cuda.init()
    refuse_expandable_segments()
    arena = Arena("torch", device=device)
    redirect_cudart(driver_and_index(device)[1], arena.id)
    torch.cuda.empty_cache()
    probe = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
    if arena.usage().used_bytes < probe.nbytes:
        raise InternalError(f"torch takes memory of {device} that is not the pool's: its CUDA runtime is linked statically")
    del probe
    torch.cuda.empty_cache()
    _count_pool_as_free()
    return arena


def _count_pool_as_free() -> None:
    """Adds the pool's free bytes to torch's free memory, by which SGLang sizes its cache and `device_usage` counts."""
    of_driver: Any = torch.cuda.mem_get_info

    @functools.wraps(of_driver)
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        free, total = of_driver(device)
        pool = pool_usage(f"cuda:{_get_device_index(device, optional=True)}")
        return free + (0 if pool is None else pool.free_bytes), total

    torch.cuda.mem_get_info = mem_get_info
