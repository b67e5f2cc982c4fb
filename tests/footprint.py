"""What every process of a running node holds: resident memory, descriptors, shared memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tasuki.client import Client, Phase
from tasuki.config.lock import holder
from tests.conftest import RunningNode

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of one process. memfd_bytes and shm_bytes: physical memory of what it has open or mapped, each file once."""

    rss_bytes: int
    num_fds: int
    memfd_bytes: int
    shm_bytes: int


def footprints(node: RunningNode) -> dict[str, Footprint]:
    """By what the process runs and its pid, the supervisor and what is below it."""
    pid = holder(node.state_dir, name="node")
    assert pid, "the node does not run"
    supervisor = psutil.Process(pid)
    found: dict[str, Footprint] = {}
    for process in (supervisor, *supervisor.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            found[_name(process)] = footprint(process)
    return found


def change_over(client: Client, *, num_changeovers: int) -> None:
    """There and back; ends in TRAIN."""
    for _ in range(num_changeovers // 2):
        client.acquire(Phase.ROLLOUT)
        client.acquire(Phase.TRAIN)


def growth(before: dict[str, Footprint], after: dict[str, Footprint]) -> dict[str, Footprint]:
    """By process; one that came or went is an error."""
    assert after.keys() == before.keys(), "processes came or went"
    return {
        name: Footprint(
            rss_bytes=after[name].rss_bytes - old.rss_bytes,
            num_fds=after[name].num_fds - old.num_fds,
            memfd_bytes=after[name].memfd_bytes - old.memfd_bytes,
            shm_bytes=after[name].shm_bytes - old.shm_bytes,
        )
        for name, old in before.items()
    }


def footprint(process: psutil.Process) -> Footprint:
    files = dict(_open_files(process.pid))
    return Footprint(
        rss_bytes=process.memory_info().rss,
        num_fds=process.num_fds(),
        memfd_bytes=sum(size for target, size in files.values() if target.startswith("/memfd:")),
        shm_bytes=sum(size for target, size in files.values() if target.startswith("/dev/shm/")),
    )


def _name(process: psutil.Process) -> str:
    words = process.cmdline()
    module = words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name if words else "?"
    return f"{module} {process.pid}"


def _open_files(pid: int) -> Iterator[tuple[tuple[int, int], tuple[str, int]]]:
    """Device and inode -> name and bytes that are there, of descriptors and of mappings."""
    for folder in ("fd", "map_files"):
        for link in os.scandir(f"/proc/{pid}/{folder}"):
            with suppress(FileNotFoundError, PermissionError):
                status, target = os.stat(link.path), os.readlink(link.path)
                yield (status.st_dev, status.st_ino), (target, 512 * status.st_blocks)
