"""Arenas: memory at fixed addresses, over csrc. tasuki_memory.h documents each call."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag
from functools import partial
from typing import Any

from tasuki.memory.library import buffer_at, call, chunk_rows, chunk_table, driver_and_index, numbers


class Keep(IntFlag):
    """Parts that a pause keeps."""

    NOTHING = 0
    CONTENT = 1  # copied to pinned host memory and back
    CHUNKS = 2  # the physical memory stays ours; only its addresses go, and a resume is a map


class Access(IntEnum):
    READ_ONLY = 0
    READ_WRITE = 1


class ArenaState(IntEnum):
    RESIDENT = 0
    PAUSED = 1
    RESUMING = 2


@dataclass(frozen=True, slots=True)
class ArenaUsage:
    """One arena. Bytes, but for the counts and the state."""

    used_bytes: int  # in blocks
    total_bytes: int  # of the chunks that hold blocks: what a resume maps
    mapped_bytes: int
    kept_bytes: int  # physical memory without an address
    host_copy_bytes: int  # pinned
    exported_bytes: int  # in open exports
    held_bytes: int  # given up by us, kept alive by peers
    num_chunks: int
    num_blocks: int
    state: ArenaState


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals over this process."""

    num_arenas: int
    mapped_bytes: int
    kept_bytes: int
    host_copy_bytes: int
    imported_bytes: int
    num_imports: int
    num_exports: int
    num_transfers: int
    num_refused_frees: int  # torch freed an address that is not ours


@dataclass(frozen=True, slots=True)
class SharedChunk:
    """Part of an arena that another process can map: `fd` holds bytes [offset, offset + num_bytes) from the arena's base."""

    offset: int
    num_bytes: int
    fd: int


def set_host_budget(num_bytes: int) -> None:
    """Limits the bytes in host arenas of this process, so that a CPU runs out of memory as cleanly as a GPU; 0 is no limit."""
    call("set_host_budget", num_bytes, device="cpu")


def freeze(address: int, num_bytes: int) -> bool:
    """Declares these bytes constant until their block is freed, so pauses that keep content copy them once.

    Returns False, without effect, for an address in no arena.
    """
    (is_ours,) = call("freeze", address, num_bytes, num_outs=1)
    return bool(is_ours)


def totals() -> Totals:
    counted = numbers([0] * len(fields(Totals)))
    call("get_totals", counted)
    return Totals(*counted)


def _free(address: int, buffers: dict[int, int]) -> None:
    del buffers[address]
    call("free", address)


class Arena:
    """One tag on one device: fixed addresses whose memory is mapped and released."""

    def __init__(
        self,
        tag: str,
        *,
        device: str,
        capacity_bytes: int = 0,
        min_chunk_bytes: int = 0,
        max_chunk_bytes: int = 0,
    ) -> None:
        """Reserves `capacity_bytes` of addresses (0: twice the device's memory). Memory comes in chunks between min and max bytes."""
        self.tag, self.device = tag, device
        self._call = partial(call, device=device, tags=(tag,))
        driver, index = driver_and_index(device)
        options = numbers([capacity_bytes, min_chunk_bytes, max_chunk_bytes])
        (self.id,) = self._call("create_arena", driver, tag.encode(), index, options, num_outs=1)
        self._buffers: dict[int, int] = {}

    def allocate(self, num_bytes: int) -> int:
        """Address of `num_bytes`, aligned to 512. Raises OutOfGpuMemory; WrongPhase while the arena sleeps."""
        (address,) = self._call("allocate", self.id, num_bytes, num_outs=1)
        return address

    def free(self, address: int) -> None:
        self._call("free", address)

    def buffer(self, num_bytes: int) -> Any:
        """Host memory as a buffer; its bytes go back to the arena when the last reference to it has gone."""
        address = self.allocate(num_bytes)
        block = buffer_at(address, num_bytes)
        self._buffers[address] = num_bytes
        # Not at exit: tensors may be used until the end, and the process's end frees everything.
        weakref.finalize(block, _free, address, self._buffers).atexit = False
        return block

    def view(self, address: int, num_bytes: int) -> Any:
        """Host memory of a block as a buffer; must not be used after `free` or while the arena sleeps."""
        return buffer_at(address, num_bytes)

    def buffers(self) -> list[tuple[int, int]]:
        """Address and bytes of every buffer that is in use."""
        return list(self._buffers.items())

    def set_policy(self, keep: Keep) -> None:
        """Sets what the next pauses keep."""
        self._call("set_policy", self.id, int(keep))

    def reserve_host(self, max_bytes: int, *, total_bytes: int = 0) -> int:
        """Pins at most `max_bytes` of the host memory that a pause copies to. Returns what is still to be pinned; 0 where nothing is kept.

        total_bytes: what the arena will hold, where that is more than it holds now. Other calls go on meanwhile.
        Raises OutOfGpuMemory when the host has no more to pin.
        """
        (missing,) = self._call("reserve_host", self.id, total_bytes, max_bytes, num_outs=1)
        return missing

    def usage(self) -> ArenaUsage:
        counted = numbers([0] * len(fields(ArenaUsage)))
        self._call("get_usage", self.id, counted)
        *counts, state = counted
        return ArenaUsage(*counts, state=ArenaState(state))

    def export(self, access: Access) -> Export:
        """New descriptors of every chunk with memory; stale after the next pause that does not keep chunks."""
        table = chunk_table([(0, 0, 0)] * self.usage().num_chunks)
        num_chunks, base, export = self._call("export", self.id, access, table, len(table), num_outs=3)
        return Export(export, base=base, chunks=[SharedChunk(*row) for row in chunk_rows(table[:num_chunks])])

    def bind_slot(self, slot: int) -> None:
        """Makes torch's allocation function number `slot` allocate here."""
        self._call("bind_slot", slot, driver_and_index(self.device)[1], self.id)

    def close(self) -> None:
        """Releases addresses and memory. Raises Busy while blocks are in use."""
        self._call("destroy_arena", self.id)


class Export:
    """Chunks handed to a peer. Open, and accounted as possibly held, until the peer is gone and `close` is called."""

    def __init__(self, export_id: int, *, base: int, chunks: list[SharedChunk]) -> None:
        self._id, self.base, self.chunks = export_id, base, chunks

    def close_fds(self) -> None:
        """Closes our copies of the descriptors, once sent."""
        for chunk in self.chunks:
            os.close(chunk.fd)
        self.chunks = []

    def close(self) -> None:
        self.close_fds()
        call("close_export", self._id)


class Import:
    """Chunks of a peer mapped at our addresses. The peer's memory stays alive until this is closed."""

    def __init__(self, chunks: Sequence[SharedChunk], *, device: str, access: Access) -> None:
        """Maps the chunks; the caller keeps the descriptors. Raises BadHandle if one does not match its description."""
        self.device = device
        self._call = partial(call, device=device)
        driver, index = driver_and_index(device)
        self._id, self.base = self._call("import", driver, index, access, _described(chunks), len(chunks), num_outs=2)

    def view(self, offset: int, num_bytes: int) -> Any:
        """Host memory of the peer as a buffer; must not be read after `release` or `close`."""
        return buffer_at(self.base + offset, num_bytes)

    def release(self) -> None:
        """Unmaps the peer's memory; keeps the addresses. Idempotent."""
        self._call("release_import", self._id)

    def renew(self, chunks: Sequence[SharedChunk]) -> None:
        """Maps the peer's present chunks at the same addresses, after `release`. Raises BadHandle, and then maps nothing."""
        self._call("renew_import", self._id, _described(chunks), len(chunks))

    def close(self) -> None:
        self._call("close_import", self._id)


def _described(chunks: Sequence[SharedChunk]) -> Any:
    return chunk_table([(chunk.offset, chunk.num_bytes, chunk.fd) for chunk in chunks])
