"""An arena of published weights, in any kind of memory: published by a trainer rank, mapped by every engine rank.

Its header has state, version and checksums, in a sealed memfd, written by its owner and read by all others.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch

from tasuki.v1 import weights_pb2
from tasuki.weights.manifest import HEADER_FIXED_WORDS, Manifest, header_bytes
from tasuki.wire.errors import BadHandle

_MAGIC = int.from_bytes(b"tasuki03", "little")
_NONE = 2**64 - 1
# Missing in Python 3.11's fcntl: forbids new writable mappings, but keeps the owner's (Linux 5.1).
_F_SEAL_FUTURE_WRITE = 0x0010
# Without these seals a peer could shrink the file and so kill readers with SIGBUS.
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class ArenaState(IntEnum):
    """State of an arena's entries."""

    EMPTY = 0
    WRITING = 1
    PUBLISHED = 2
    WITHDRAWN = 3


@dataclass(frozen=True, slots=True)
class HeaderContent:
    """Contents of the header; the version is None unless the state is PUBLISHED."""

    state: ArenaState
    version: int | None


class Header:
    """The header words of a mapping."""

    def __init__(self, manifest: Manifest, mapping: mmap.mmap) -> None:
        self._rank, self._num_entries = manifest.rank, len(manifest.entries)
        # An 8-byte word is stored by a single instruction, so a reader sees the old or the new one.
        self._words = memoryview(mapping)[: header_bytes(self._num_entries)].cast("Q")

    def read(self) -> HeaderContent:
        """Raises BadHandle if there is no header of this layout."""
        magic, num_entries, state, version = self._words[:HEADER_FIXED_WORDS]
        if magic != _MAGIC or num_entries != self._num_entries or state not in list(ArenaState):
            raise BadHandle(f"the arena of rank {self._rank} has no valid header", rank=self._rank)
        is_published = state == ArenaState.PUBLISHED and version != _NONE
        return HeaderContent(ArenaState(state), version if is_published else None)

    def checksums(self) -> np.ndarray:
        """Checksums of the entries, uint64; valid only in state PUBLISHED."""
        return np.array(self._words[HEADER_FIXED_WORDS:], dtype=np.uint64)

    def write_state(self, state: ArenaState) -> None:
        """Marks the entries as unreadable with any state but PUBLISHED."""
        self._words[3] = _NONE
        self._words[2] = state
        self._words[1] = self._num_entries
        self._words[0] = _MAGIC

    def write_published(self, version: int, checksums: Sequence[int]) -> None:
        """Marks the entries as readable. Writes the version last."""
        for index, value in enumerate(checksums, start=HEADER_FIXED_WORDS):
            self._words[index] = value
        self._words[2] = ArenaState.PUBLISHED
        self._words[3] = version

    def close(self) -> None:
        self._words.release()


def create_sealed(name: str, num_bytes: int) -> tuple[mmap.mmap, int]:
    """Creates a memfd that only this mapping can write and nobody can resize. The caller owns the descriptor."""
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
    """Maps a peer's memfd read-only. Raises BadHandle unless it has this size and is sealed against resizing."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise BadHandle(f"rank {rank} sent a descriptor that is not a memfd", rank=rank) from error
    size = os.fstat(fd).st_size
    if size != num_bytes or seals & _FIXED_SIZE != _FIXED_SIZE:
        text = f"rank {rank} sent memory of {size} bytes, seals {seals:#x}; its manifest says {num_bytes} bytes, which must be sealed"
        raise BadHandle(text, rank=rank)
    return mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)


def device_uuid(device: torch.device) -> str:
    """CUDA's UUID of the GPU, the same in every process and container."""
    return str(torch.cuda.get_device_properties(device).uuid)


class PeerMemory(Protocol):
    """A peer's memory, mapped here."""

    def release(self) -> None:
        """Unmaps the memory but keeps its addresses. Idempotent."""
        ...

    def renew(self, fds: Sequence[int]) -> None:
        """After `release`: maps other memory with the same layout at the same addresses. The caller owns the descriptors."""
        ...

    def close(self) -> None: ...


class WeightArena:
    """A trainer rank's arena, as seen by its owner or a reader.

    tensors: one per entry of the manifest, in its shape and dtype, in the memory itself; none if only the header is mapped.
    memory: of a peer; None for an owner and for a header alone. fds: the owner's, to share; the header's comes first.
    message: the manifest as a peer sent it.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        kind: weights_pb2.HandleKind.ValueType,
        header: Header,
        tensors: Sequence[torch.Tensor],
        memory: PeerMemory | None = None,
        fds: Sequence[int] = (),
        message: bytes | None = None,
    ) -> None:
        self.manifest, self.kind, self.header, self.fds = manifest, kind, header, list(fds)
        self.tensors = list(tensors)
        self.message = message
        self._memory = memory
        self.holds_memory = True

    @property
    def is_mapped(self) -> bool:
        """Whether more than the header is mapped."""
        return len(self.tensors) == len(self.manifest.entries)

    def release(self) -> None:
        """Unmaps a peer's memory. Its tensors must not be used until `renew`."""
        if self._memory is not None:
            self._memory.release()
        self.holds_memory = False

    def renew(self, manifest: Manifest, fds: Sequence[int]) -> None:
        """Maps a peer's current memory. On BadHandle nothing is mapped."""
        if manifest != self.manifest or len(fds) != 1 + len(manifest.chunk_bytes):
            raise BadHandle(f"rank {manifest.rank} published a layout that differs from its handle", rank=manifest.rank)
        self.release()
        if self._memory is not None:
            self._memory.renew(fds[1:])
        self.holds_memory = True

    def close(self) -> None:
        """Closes a reader's side: unmaps the memory, whose tensors must no longer be used."""
        self.header.close()
        self.tensors.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
