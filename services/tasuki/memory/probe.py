"""Whether a device's memory passes from one process to another, tried with 2 MiB: python -m tasuki.memory.probe cpu | cuda:0"""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tasuki.memory.arena import Arena, buffer_at
from tasuki.memory.shared_chunks import Export, Import, SharedChunk
from tasuki.wire.errors import TasukiError

_NUM_BYTES = 2 << 20
_PATTERN = bytes(range(256)) * (_NUM_BYTES // 256)
_TIMEOUT_S = 60.0


class _AtAddress:
    """Device memory, for torch.as_tensor."""

    def __init__(self, address: int) -> None:
        shape = (_NUM_BYTES,)
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def give(device: str) -> None:
    """Writes a pattern for another process to read. Raises TasukiError, or RuntimeError with that process's output."""
    _begin(device)
    arena = Arena("probe", device=device, capacity_bytes=64 << 20)
    address = arena.allocate(_NUM_BYTES)
    _bytes_at(device, address)[:] = _as_bytes(device)
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
    _begin(device)
    chunks = [SharedChunk(*map(int, one.split(":"))) for one in described]
    imported = Import(chunks, device=device)
    if device == "cpu":
        content = bytes(buffer_at(imported.base + offset, _NUM_BYTES))
    else:
        import torch

        content = bytes(torch.as_tensor(_AtAddress(imported.base + offset), device=device).cpu().numpy())
    if content != _PATTERN:
        raise RuntimeError("another process reads other bytes than were written")
    imported.close()


def _begin(device: str) -> None:
    if device != "cpu":
        import torch

        torch.zeros(1, device=device)  # makes the context


def _bytes_at(device: str, address: int) -> Any:
    if device == "cpu":
        return buffer_at(address, _NUM_BYTES)
    import torch

    return torch.as_tensor(_AtAddress(address), device=device)


def _as_bytes(device: str) -> Any:
    if device == "cpu":
        return _PATTERN
    import torch

    return torch.frombuffer(bytearray(_PATTERN), dtype=torch.uint8)


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
