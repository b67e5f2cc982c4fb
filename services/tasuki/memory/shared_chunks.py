"""Chunks of arenas mapped by another process, through file descriptors. Tried with 2 MiB: python -m tasuki.memory.shared_chunks cpu"""

import ctypes  # noqa: TID251  the library's table of chunks
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from tasuki.memory.arena import Arena, buffer_at, call, driver_and_index
from tasuki.wire.errors import TasukiError

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


_NUM_BYTES = 2 << 20
_PATTERN = bytes(range(256)) * (_NUM_BYTES // 256)
_TIMEOUT_S = 60.0


def give(device: str) -> None:
    """Writes a pattern for another process to read. Raises TasukiError, or RuntimeError with that process's output."""
    arena = Arena("probe", device=_ready(device), capacity_bytes=64 << 20)
    address = arena.allocate(_NUM_BYTES)
    _move(device, address, bytearray(_PATTERN), reads=False)
    export = Export(arena)
    try:
        chunks = [f"{chunk.offset}:{chunk.num_bytes}:{chunk.fd}" for chunk in export.chunks]
        fds = [chunk.fd for chunk in export.chunks]
        argv = [sys.executable, "-P", "-m", "tasuki.memory.shared_chunks", device, str(address - export.base), *chunks]
        done = subprocess.run(argv, pass_fds=fds, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    finally:
        export.close()
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise RuntimeError(said[-1] if said else f"the reading process ended with {done.returncode}")


def take(device: str, offset: int, described: Sequence[str]) -> None:
    """Reads the pattern in the other process, at `offset` of the chunks. Raises RuntimeError if it differs."""
    imported = Import([SharedChunk(*map(int, one.split(":"))) for one in described], device=_ready(device))
    content = bytearray(_NUM_BYTES)
    _move(device, imported.base + offset, content, reads=True)
    if content != _PATTERN:
        raise RuntimeError("another process reads other bytes than were written")
    imported.close()


def _ready(device: str) -> str:
    if device != "cpu":
        import torch

        torch.zeros(1, device=device)  # makes the context
    return device


def _move(device: str, address: int, content: bytearray, *, reads: bool) -> None:
    """Copies the device's memory to `content`, or back."""
    there: Any = buffer_at(address, _NUM_BYTES)
    here: Any = content
    if device != "cpu":
        import torch

        shown = {"shape": (_NUM_BYTES,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}
        there = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=shown), device=device)
        here = torch.frombuffer(content, dtype=torch.uint8)
    target, source = (here, there) if reads else (there, here)
    target[:] = source


def main(arguments: Sequence[str]) -> int:
    try:
        if len(arguments) == 1:
            give(arguments[0])
        else:
            take(arguments[0], int(arguments[1]), arguments[2:])
    except (TasukiError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
