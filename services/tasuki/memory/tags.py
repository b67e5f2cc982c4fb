"""The classes of memory that sleep and wake, and what is known of each and of the device they share. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MemoryTag(StrEnum):
    """A named class of memory that is paused and resumed as a whole."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"
    EXPORT = "export"


class MovementKind(StrEnum):
    """How memory moves behind a stage's answer."""

    LEAVE = "LEAVE"
    """Copied to the host and released when rollout needs the room: from OFFLOAD until LOAD_TRAINER."""
    RETURN = "RETURN"
    """Copied back into mapped pages: from LOAD_TRAINER until OFFLOAD."""
    GROW = "GROW"
    """Mapped as requests need it: from RESUME_KV until DRAIN."""


@dataclass(frozen=True, slots=True)
class Movement:
    """What goes on behind a stage's answer, by tag. seconds, end_time (since 1970): 0 while it goes on."""

    kind: MovementKind
    tag: MemoryTag
    num_bytes: int
    """The most that may move, or what has moved in the end."""
    seconds: float = 0.0
    end_time: float = 0.0


@dataclass(frozen=True, slots=True)
class Moved:
    """What a pause or resume came to: bytes released or mapped, what goes on behind it, and what has ended since the last one."""

    num_bytes: int
    begun: tuple[Movement, ...] = ()
    ended: tuple[Movement, ...] = ()


@dataclass(frozen=True, slots=True)
class TagUsage:
    """One tag on one device. Bytes."""

    tag: MemoryTag
    device: str
    mapped_bytes: int
    total_bytes: int  # when it is awake
    is_paused: bool
    kept_bytes: int  # physical memory without an address
    host_copy_bytes: int
    stays: bool = False  # over a changeover, by the planner's decision
    following_bytes: int = 0  # of the total, what comes after a resume, as memory becomes free
    leaves_later: bool = False  # a pause answers first, and its pages go when others need them
    pending_bytes: int = 0  # what a stage's answer left to be moved, and is not moved yet

    @property
    def is_leaving(self) -> bool:
        """Whether it is asleep, and its pages are still there."""
        return self.leaves_later and self.is_paused and self.mapped_bytes > 0

    @property
    def pending(self) -> MovementKind | None:
        """How the pending bytes will move; None without any."""
        if not self.pending_bytes:
            return None
        if self.is_paused:
            return MovementKind.LEAVE
        return MovementKind.GROW if self.tag is MemoryTag.KV_CACHE else MovementKind.RETURN


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """One device as one rank sees it. Bytes. On "cpu" it is the host: its memory and the rank's resident part of it."""

    device: str
    rank: int
    total_bytes: int
    free_bytes: int  # the driver, on "cpu" the system, would give them now
    process_bytes: int  # this process's, whoever in it took them
    torch_cached_bytes: int  # held by torch's own allocator and used by no tensor; not visible as free; 0 on "cpu"
    other_processes_bytes: int
    pool_bytes: int = 0  # of the node's pool on the device; 0 without one
    pool_free_bytes: int = 0  # of its chunks that nobody holds


@dataclass(frozen=True, slots=True)
class ServiceUsage:
    """What the ranks of one service say of their tags and of the devices that they are on."""

    tags: tuple[TagUsage, ...]
    devices: tuple[DeviceUsage, ...]
