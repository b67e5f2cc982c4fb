"""Pool of physical chunks per device, made once and lent to the node's processes in turn. csrc/pool.h has the mechanism."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields

from tasuki.memory.granularity import rounded_up
from tasuki.memory.library import call, descriptors, driver_and_index, numbers

MAX_CHUNKS = 252
"""On a CPU, where every process that joins keeps a descriptor of each."""
_CHUNK_STEP_BYTES = 2 * 2**20
GPU_CHUNK_BYTES = 256 * 2**20
"""100 GiB in such chunks are mapped in 13 ms and unmapped in 8 on an H200 (docs/benchmarks.md)."""


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Chunks of a pool, by who holds them."""

    chunk_bytes: int
    num_chunks: int
    num_free: int
    num_lent: int  # taken, and mapped by nobody
    num_mapped: int  # for writing, each by its owner
    num_published: int  # of those two, what others may read
    num_read: int  # with readers, whoever owns them
    num_ours: int  # taken by the process that asks

    @property
    def free_bytes(self) -> int:
        return self.num_free * self.chunk_bytes

    @property
    def total_bytes(self) -> int:
        return self.num_chunks * self.chunk_bytes


@dataclass(frozen=True, slots=True)
class Identity:
    """A process for as long as the machine runs, as its pool's keeper sees it."""

    pid: int
    start: int  # clock ticks since the machine's

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Raises InternalError when no process has the pid."""
        (start,) = call("identify_process", pid, num_outs=1)
        return cls(pid, start)


def pool_chunk_bytes(pool_bytes: int) -> int:
    """Size of the chunks of a CPU's pool: as small as their number allows, since every arena rounds up to whole ones."""
    return max(_CHUNK_STEP_BYTES, rounded_up(-(-pool_bytes // MAX_CHUNKS), _CHUNK_STEP_BYTES))


def pool_bytes(num_bytes: int) -> int:
    """Bytes that a CPU's pool of `num_bytes` really holds, in whole chunks."""
    chunk_bytes = pool_chunk_bytes(num_bytes)
    return max(1, num_bytes // chunk_bytes) * chunk_bytes


class PoolKeeper:
    """The chunks of one device, kept for the node. Whoever keeps them uses none, and outlives all who do.

    The memory lives as long as a descriptor or a mapping of it, here or in a process that has joined.
    """

    def __init__(self, num_bytes: int, *, device: str, chunk_bytes: int = 0) -> None:
        """Makes as many whole chunks as `num_bytes` hold, at least one. chunk_bytes: 0 is the default of the device.

        Raises OutOfGpuMemory, with needed and free bytes, when the device has no room for all of them.
        """
        self.device = device
        chunk_bytes = chunk_bytes or (pool_chunk_bytes(num_bytes) if device == "cpu" else GPU_CHUNK_BYTES)
        num_chunks = max(1, num_bytes // chunk_bytes)
        driver, index = driver_and_index(device)
        made = descriptors([-1] * (1 + num_chunks))
        call("make_pool", driver, index, num_chunks, chunk_bytes, made, device=device, tags=("pool",))
        self.fds: list[int] = list(made)

    @classmethod
    def of(cls, fds: Sequence[int], *, device: str) -> PoolKeeper:
        """Keeps chunks that another process made. fds: of their table and the chunks; the keeper takes them over."""
        keeper = cls.__new__(cls)
        keeper.device, keeper.fds = device, list(fds)
        return keeper

    def usage(self) -> PoolUsage:
        counted = numbers([0] * len(fields(PoolUsage)))
        call("read_pool", self.fds[0], counted)
        return PoolUsage(*counted)

    def reclaim(self) -> int:
        """Frees the chunks of processes that are certainly dead. Returns the number of chunks and of chunk readers freed."""
        (num_freed,) = call("reclaim_pool", self.fds[0], num_outs=1)
        return num_freed

    def close(self) -> None:
        """Idempotent. Processes that have joined keep what they have."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def device_room(device: str) -> tuple[int, int]:
    """Free and total bytes of a device, or of the pool that this process has opened for it."""
    free, total = call("get_room", *driver_and_index(device), num_outs=2, device=device)
    return free, total


def open_pool(fds: Sequence[int], *, device: str, identity: Identity) -> None:
    """From now on this process's arenas of `device` take their chunks from the pool. To be called before the first arena.

    fds: of a PoolKeeper; they stay the caller's. Raises BadHandle for descriptors of no pool; Busy where arenas exist.
    """
    table = descriptors(fds)
    call("open_pool", *driver_and_index(device), table, len(table), identity.pid, identity.start, device=device, tags=("pool",))


def close_pool(device: str) -> None:
    """Closes the pool. Raises Busy while arenas or imports use it."""
    call("close_pool", *driver_and_index(device), device=device, tags=("pool",))


def pool_usage(device: str) -> PoolUsage | None:
    """Usage of the pool that this process opened for the device; None without one."""
    counted = numbers([0] * len(fields(PoolUsage)))
    call("get_pool", *driver_and_index(device), counted, device=device, tags=("pool",))
    usage = PoolUsage(*counted)
    return usage if usage.num_chunks else None
