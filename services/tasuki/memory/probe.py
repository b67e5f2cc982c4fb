"""Whether a device's memory passes from one process to another, tried with 2 MiB: python -m tasuki.memory.probe cpu | cuda:0"""

import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tasuki.memory.arena import Arena, buffer_at
from tasuki.memory.shared_chunks import Export, Import, SharedChunk
from tasuki.wire.errors import TasukiError

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
        argv = [sys.executable, "-P", "-m", "tasuki.memory.probe", device, str(address - export.base), *chunks]
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
