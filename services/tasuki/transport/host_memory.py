"""Arenas in host memory: a sealed memfd, mapped writable by the trainer rank that owns it and read-only by everyone else."""

from __future__ import annotations

import fcntl
import mmap
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from tasuki.transport.manifest import HEADER_FIXED_WORDS, Entry, Manifest, header_bytes
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
    """What the header says: version and checksums count only when the state is PUBLISHED."""

    state: ArenaState
    version: int | None
    checksums: tuple[int, ...]


class Arena:
    """One mapping with its header and a tensor for each entry. Made by `create_arena` or `map_arena`."""

    def __init__(self, manifest: Manifest, mapping: mmap.mmap, *, is_writable: bool) -> None:
        self.manifest = manifest
        start, end = manifest.header_offset, manifest.header_offset + header_bytes(len(manifest.entries))
        # Words of 8 bytes are stored by one instruction each, so a reader sees the old or the new one.
        self._header = memoryview(mapping)[start:end].cast("Q")
        self._tensors = [_tensor_of(mapping, entry, is_writable=is_writable) for entry in manifest.entries]

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """One for each entry of the manifest, of its shape and dtype, in the mapped memory itself."""
        return self._tensors

    def read_header(self) -> HeaderContent:
        """Raises BadHandle when there is no header of this layout."""
        magic, num_entries, state, version = self._header[:HEADER_FIXED_WORDS]
        if magic != _MAGIC or num_entries != len(self.manifest.entries) or state not in list(ArenaState):
            raise BadHandle(f"the arena of rank {self.manifest.rank} has no valid header", rank=self.manifest.rank)
        is_published = state == ArenaState.PUBLISHED and version != _NO_VERSION
        return HeaderContent(ArenaState(state), version if is_published else None, tuple(self._header[HEADER_FIXED_WORDS:]))

    def write_state(self, state: ArenaState) -> None:
        """Marks the entries as unreadable: any state but PUBLISHED."""
        self._header[3] = _NO_VERSION
        self._header[2] = state
        self._header[1] = len(self.manifest.entries)
        self._header[0] = _MAGIC

    def write_published(self, version: int, checksums: Sequence[int]) -> None:
        """Marks the entries as readable; the version is written last."""
        for index, value in enumerate(checksums, start=HEADER_FIXED_WORDS):
            self._header[index] = value
        self._header[2] = ArenaState.PUBLISHED
        self._header[3] = version

    def close(self) -> None:
        """Unmaps once the last tensor that lies in the mapping is gone."""
        self._header.release()
        self._tensors.clear()


def create_arena(manifest: Manifest) -> tuple[Arena, int]:
    """A new arena of the manifest's size and the descriptor to hand out, which belongs to the caller."""
    fd = os.memfd_create(f"tasuki-weights-{manifest.rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, manifest.arena_bytes)
        mapping = mmap.mmap(fd, manifest.arena_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    arena = Arena(manifest, mapping, is_writable=True)
    arena.write_state(ArenaState.EMPTY)
    return arena, fd


def map_arena(manifest: Manifest, fd: int) -> Arena:
    """A peer's arena, read-only. Raises BadHandle unless `fd` is a memfd of the manifest's size that nobody can resize."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise BadHandle(f"rank {manifest.rank} sent a descriptor that is no memfd", rank=manifest.rank) from error
    size = os.fstat(fd).st_size
    if size != manifest.arena_bytes or seals & _FIXED_SIZE != _FIXED_SIZE:
        raise BadHandle(
            f"rank {manifest.rank} sent memory of {size} bytes, seals {seals:#x}; "
            f"its manifest says {manifest.arena_bytes} bytes, which must be sealed",
            rank=manifest.rank,
        )
    mapping = mmap.mmap(fd, manifest.arena_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    return Arena(manifest, mapping, is_writable=False)


def _tensor_of(mapping: mmap.mmap, entry: Entry, *, is_writable: bool) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    with warnings.catch_warnings():
        if not is_writable:
            # torch knows no read-only tensors and says so; a write would be stopped by the page protection.
            warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        flat = torch.frombuffer(mapping, dtype=dtype, count=entry.numel, offset=entry.offset)
    return flat.view(entry.shape)
