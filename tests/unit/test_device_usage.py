"""Device memory that a rank reports, against the system's figures."""

import os

import psutil
import torch

from tasuki.memory.arena import NativeAllocator
from tasuki.memory.device_usage import device_usage
from tasuki.wire.stages import MemoryTag

MIB = 1 << 20


def test_host_is_seen_as_the_system_sees_it():
    usage = device_usage("cpu", 3)
    memory = psutil.virtual_memory()
    assert (usage.device, usage.rank, usage.total_bytes, usage.torch_cached_bytes) == ("cpu", 3, memory.total, 0)
    assert abs(usage.free_bytes - memory.available) < 512 * MIB
    assert abs(usage.process_bytes - psutil.Process(os.getpid()).memory_info().rss) < 64 * MIB
    assert usage.other_processes_bytes == usage.total_bytes - usage.free_bytes - usage.process_bytes


def test_memory_of_an_arena_counts_while_it_is_mapped():
    allocator = NativeAllocator(tags=[MemoryTag.WEIGHTS], device="cpu", min_chunk_bytes=MIB, max_chunk_bytes=64 * MIB)
    with allocator.region(MemoryTag.WEIGHTS):
        weights = torch.ones(64 * MIB, dtype=torch.uint8)
    awake = device_usage("cpu", 0).process_bytes
    allocator.pause([MemoryTag.WEIGHTS])
    assert awake - device_usage("cpu", 0).process_bytes > 60 * MIB
    del weights
    allocator.close()
