"""The header of an arena: state, version and checksums in a sealed memfd, written by its owner and read by everyone else."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from tasuki.transport.manifest import HEADER_FIXED_WORDS, Manifest, header_bytes
from tasuki.wire.errors import BadHandle

_MAGIC = int.from_bytes(b"tasuki01", "little")
_NO_VERSION = 2**64 - 1
# Missing in Python 3.11's fcntl: no new writable mapping, while the owner's stays (Linux 5.1).
_F_SEAL_FUTURE_WRITE = 0x0010
# Without these a peer could shrink the file under a reader, who would then be killed by SIGBUS.
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class ArenaState(IntEnum):
    """Whether the entries of an arena may be read."""

    EMPTY = 0
    WRITING = 1
    PUBLISHED = 2
    WITHDRAWN = 3


@dataclass(frozen=True, slots=True)
class HeaderContent:
    """What the header says: the version counts only when the state is PUBLISHED."""

    state: ArenaState
    version: int | None


class Header:
    """The words at the beginning of a mapping."""

    def __init__(self, manifest: Manifest, mapping: mmap.mmap) -> None:
        self._rank, self._num_entries = manifest.rank, len(manifest.entries)
        # Words of 8 bytes are stored by one instruction each, so a reader sees the old or the new one.
        self._words = memoryview(mapping)[: header_bytes(self._num_entries)].cast("Q")

    def read(self) -> HeaderContent:
        """Raises BadHandle when there is no header of this layout."""
        magic, num_entries, state, version = self._words[:HEADER_FIXED_WORDS]
        if magic != _MAGIC or num_entries != self._num_entries or state not in list(ArenaState):
            raise BadHandle(f"the arena of rank {self._rank} has no valid header", rank=self._rank)
        is_published = state == ArenaState.PUBLISHED and version != _NO_VERSION
        return HeaderContent(ArenaState(state), version if is_published else None)

    def checksums(self) -> np.ndarray:
        """Of the entries, uint64; they count only when the state is PUBLISHED."""
        return np.array(self._words[HEADER_FIXED_WORDS:], dtype=np.uint64)

    def write_state(self, state: ArenaState) -> None:
        """Marks the entries as unreadable: any state but PUBLISHED."""
        self._words[3] = _NO_VERSION
        self._words[2] = state
        self._words[1] = self._num_entries
        self._words[0] = _MAGIC

    def write_published(self, version: int, checksums: Sequence[int]) -> None:
        """Marks the entries as readable; the version is written last."""
        for index, value in enumerate(checksums, start=HEADER_FIXED_WORDS):
            self._words[index] = value
        self._words[2] = ArenaState.PUBLISHED
        self._words[3] = version

    def close(self) -> None:
        self._words.release()


def create_sealed(name: str, num_bytes: int) -> tuple[mmap.mmap, int]:
    """A memfd that only this mapping can write and nobody can resize. The descriptor belongs to the caller."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        mapping = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return mapping, fd


def map_sealed(fd: int, num_bytes: int, *, rank: int) -> mmap.mmap:
    """A peer's memfd, read-only. Raises BadHandle unless it has this size and nobody can resize it."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise BadHandle(f"rank {rank} sent a descriptor that is no memfd", rank=rank) from error
    size = os.fstat(fd).st_size
    if size != num_bytes or seals & _FIXED_SIZE != _FIXED_SIZE:
        raise BadHandle(
            f"rank {rank} sent memory of {size} bytes, seals {seals:#x}; "
            f"its manifest says {num_bytes} bytes, which must be sealed",
            rank=rank,
        )
    return mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
