"""Memory tags, their movements, and the usage of tags and devices. Plain data."""

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


class MovementKind(StrEnum):
    """Kind of movement that continues after a stage's answer."""

    LEAVE = "LEAVE"
    """Copied to the host and released when rollout needs the room: from OFFLOAD until LOAD_TRAINER."""
    RETURN = "RETURN"
    """Copied back into mapped pages: from LOAD_TRAINER until OFFLOAD."""
    GROW = "GROW"
    """Mapped as requests need it: from RESUME_KV until DRAIN."""


@dataclass(frozen=True, slots=True)
class Movement:
    """Movement of one tag after a stage's answer. seconds, end_time (since 1970): 0 while it lasts."""

    kind: MovementKind
    tag: MemoryTag
    num_bytes: int
    """Most bytes that may move; once it has ended, the bytes moved."""
    seconds: float = 0.0
    end_time: float = 0.0


@dataclass(frozen=True, slots=True)
class Moved:
    """Result of a pause or resume: bytes released or mapped, movements that continue, and movements ended since the last one."""

    num_bytes: int
    begun: tuple[Movement, ...] = ()
    ended: tuple[Movement, ...] = ()


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
    following_bytes: int = 0  # part of the total, mapped after a resume as memory becomes free
    leaves_later: bool = False  # a pause answers at once; pages are released when others need them
    pending_bytes: int = 0  # still to be moved after a stage's answer

    @property
    def is_leaving(self) -> bool:
        """Whether it is asleep but still has pages."""
        return self.leaves_later and self.is_paused and self.mapped_bytes > 0

    @property
    def pending(self) -> MovementKind | None:
        """Kind of movement of the pending bytes; None if there are none."""
        if not self.pending_bytes:
            return None
        if self.is_paused:
            return MovementKind.LEAVE
        return MovementKind.GROW if self.tag is MemoryTag.KV_CACHE else MovementKind.RETURN


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
    pool_bytes: int = 0  # of the node's pool on the device; 0 without one
    pool_free_bytes: int = 0  # of its free chunks


@dataclass(frozen=True, slots=True)
class ServiceUsage:
    """Usage that the ranks of one service report, by tag and device."""

    tags: tuple[TagUsage, ...]
    devices: tuple[DeviceUsage, ...]
