"""Memory tags, and the usage of tags and devices. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MemoryTag(StrEnum):
    """Named class of memory that is paused and resumed as a whole."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"
    EXPORT = "export"


@dataclass(frozen=True, slots=True)
class TagUsage:
    """One tag on one device. Bytes."""

    tag: MemoryTag
    device: str
    mapped_bytes: int
    total_bytes: int  # while it is awake
    is_paused: bool
    kept_bytes: int  # physical memory without an address
    host_copy_bytes: int
    stays: bool = False  # through a changeover, as the planner decided


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """One device as one rank sees it, in bytes. "cpu" is the host: its memory and the rank's resident part."""

    device: str
    rank: int
    total_bytes: int
    free_bytes: int  # available now from the driver, on "cpu" from the system
    process_bytes: int  # held by this process as a whole
    torch_cached_bytes: int  # cached by torch's allocator, in no tensor; not counted as free; 0 on "cpu"
    other_processes_bytes: int


@dataclass(frozen=True, slots=True)
class ServiceUsage:
    """Usage that the ranks of one service report, by tag and device."""

    tags: tuple[TagUsage, ...]
    devices: tuple[DeviceUsage, ...]
