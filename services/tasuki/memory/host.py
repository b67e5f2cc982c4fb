"""The machine's memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

_KIB = 1024


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. `available_bytes`: what the system would give without swapping."""

    total_bytes: int
    available_bytes: int


def host_memory() -> HostMemory:
    sizes: dict[str, int] = {}
    with Path("/proc/meminfo").open() as lines:
        for line in islice(lines, 3):  # MemTotal, MemFree, MemAvailable
            name, value = line.split(":")
            sizes[name] = int(value.split()[0]) * _KIB
    return HostMemory(sizes["MemTotal"], sizes["MemAvailable"])
