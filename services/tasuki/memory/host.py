"""The machine's memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_KIB = 1024


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. `available_bytes`: what the system would give without swapping."""

    total_bytes: int
    available_bytes: int


def host_memory() -> HostMemory:
    sizes: dict[str, int] = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        sizes[name] = int(value.split()[0]) * _KIB
    return HostMemory(sizes["MemTotal"], sizes["MemAvailable"])
