"""Fixtures for tests of arenas on a GPU."""

import gc

import pytest
import torch

from tasuki.memory.arena import Keep, NativeAllocator
from tasuki.wire.stages import MemoryTag

WEIGHTS, OPTIMIZER, KV_CACHE, CUDA_GRAPH = MemoryTag.WEIGHTS, MemoryTag.OPTIMIZER, MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH


@pytest.fixture
def allocator():
    made = NativeAllocator(
        tags=[WEIGHTS, OPTIMIZER, KV_CACHE, CUDA_GRAPH],
        device="cuda:0",
        keep={OPTIMIZER: Keep.CONTENT, CUDA_GRAPH: Keep.CONTENT},
    )
    yield made
    gc.collect()
    torch.cuda.synchronize()
    made.close()
    torch.cuda.empty_cache()


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]
