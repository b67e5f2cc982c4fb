"""Memory of a rank's device: total, free, held by this rank, and held by others."""

import os
from functools import cache
from pathlib import Path
from typing import Any

from tasuki.memory import arena as native
from tasuki.memory.host import host_memory
from tasuki.v1.types_pb2 import DeviceUsage


def device_usage(device: str, rank: int, *, skip_torch_cache: bool = False) -> DeviceUsage:
    """The device at this moment; device is "cpu" or torch's name of a GPU, rank the caller's place in its service.

    skip_torch_cache: does not count what torch caches, which takes milliseconds with thousands of tensors.
    """
    if device == "cpu":
        host, ours, cached = host_memory(), resident_bytes(), 0
        free, total = host.available_bytes, host.total_bytes
    else:
        free, total, ours, cached = _gpu(device, skip_torch_cache=skip_torch_cache)
    usage = DeviceUsage(device=device, rank=rank, total_bytes=total, free_bytes=free, process_bytes=ours)
    usage.torch_cached_bytes, usage.other_processes_bytes = cached, max(0, total - free - ours)
    return usage


def resident_bytes() -> int:
    """Physical memory of this process, its part of shared mappings included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _gpu(device: str, *, skip_torch_cache: bool) -> tuple[int, int, int, int]:
    """Bytes that are free, in total, of this process, and cached by torch."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = (0, 0) if skip_torch_cache else torch_pool(torch.device(device).index or 0)
    ours = _own_bytes(str(torch.cuda.get_device_properties(device).uuid))
    if ours is None:
        # In its own PID namespace a process does not find itself in NVML's list; what it knows of is then a lower bound.
        arenas = native.totals()
        ours = arenas.mapped_bytes + arenas.kept_bytes + reserved
    return free, total, min(ours, total - free), reserved - allocated


def torch_pool(index: int) -> tuple[int, int]:
    """Bytes that torch's default pool holds, and those of them in tensors. Its other pools are our arenas, asleep or not."""
    import torch

    segments: Any = torch.cuda.memory_snapshot()
    ours = [one for one in segments if one["device"] == index and tuple(one["segment_pool_id"]) == (0, 0)]
    return sum(one["total_size"] for one in ours), sum(one["allocated_size"] for one in ours)


def _own_bytes(uuid: str) -> int | None:
    """GPU memory of this process; None if NVML, which lists the host's process ids, does not list it."""
    nvml, handle = _nvml_device(uuid)
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return next((each.usedGpuMemory for each in processes if each.pid == os.getpid()), None)


@cache
def _nvml_device(uuid: str) -> tuple[Any, Any]:
    """NVML, loaded once since that takes milliseconds, and its handle of the GPU."""
    import pynvml

    nvml: Any = pynvml
    nvml.nvmlInit()
    # By its id: NVML numbers all GPUs of the machine, torch those that CUDA_VISIBLE_DEVICES leaves.
    return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
