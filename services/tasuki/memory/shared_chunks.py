"""Chunks of arenas mapped by another process, through file descriptors."""

import ctypes  # noqa: TID251  the library's table of chunks
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from tasuki.memory.arena import Arena, call, driver_and_index

_READ_ONLY = 0


class SharedChunk(NamedTuple):
    """Part of an arena: `fd` holds bytes [offset, offset + num_bytes) from the arena's base."""

    offset: int
    num_bytes: int
    fd: int


class _Chunk(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("fd", ctypes.c_int32)]


class Export:
    """Chunks handed to a peer. Open, and accounted as possibly held, until the peer is gone and `close` is called."""

    def __init__(self, arena: Arena) -> None:
        """Makes descriptors of every chunk with memory; stale after the next pause that does not keep chunks."""
        table = _table([(0, 0, 0)] * arena.usage().num_chunks)
        about = {"device": arena.device, "tags": (arena.tag,), "num_outs": 3}
        num_chunks, self.base, self._id = call("export", arena.id, _READ_ONLY, table, len(table), **about)
        self.chunks = [SharedChunk(chunk.offset, chunk.bytes, chunk.fd) for chunk in table[:num_chunks]]

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

    def __init__(self, chunks: Sequence[SharedChunk], *, device: str) -> None:
        """Maps the chunks; the caller keeps the descriptors. Raises BadHandle if one does not match its description."""
        self.device = device
        self._call = partial(call, device=device)
        driver, index = driver_and_index(device)
        self._id, self.base = self._call("import", driver, index, _READ_ONLY, _table(chunks), len(chunks), num_outs=2)

    def release(self) -> None:
        """Unmaps the peer's memory; keeps the addresses. Idempotent."""
        self._call("release_import", self._id)

    def renew(self, chunks: Sequence[SharedChunk]) -> None:
        """Maps the peer's present chunks at the same addresses, after `release`. Raises BadHandle, and then maps nothing."""
        self._call("renew_import", self._id, _table(chunks), len(chunks))

    def close(self) -> None:
        self._call("close_import", self._id)


def _table(chunks: Sequence[tuple[int, int, int]]) -> Any:
    """Chunks as the library reads and fills them."""
    return (_Chunk * max(1, len(chunks)))(*chunks)
