"""Resources of every process of a running node: resident memory, descriptors and shared memory."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from operator import sub
from pathlib import Path

import psutil

from tasuki.client import Client, Phase
from tasuki.config.lock import holder
from tests.conftest import RunningNode

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resources of one process. memfd_bytes, shm_bytes: physical memory of files open or mapped, each file counted once."""

    rss_bytes: int
    address_bytes: int
    num_mappings: int
    num_fds: int
    memfd_bytes: int
    shm_bytes: int


def footprints(node: RunningNode) -> dict[str, Footprint]:
    """Returns a footprint for the supervisor and each process below it, keyed by program and pid."""
    pid = holder(node.state_dir, name="node")
    assert pid, "the node does not run"
    supervisor = psutil.Process(pid)
    found: dict[str, Footprint] = {}
    for process in (supervisor, *supervisor.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            found[_name(process)] = footprint(process)
    return found


def footprint(process: psutil.Process) -> Footprint:
    files, memory = dict(_open_files(process.pid)), process.memory_info()
    return Footprint(
        rss_bytes=memory.rss,
        address_bytes=memory.vms,
        num_mappings=len(os.listdir(f"/proc/{process.pid}/map_files")),
        num_fds=process.num_fds(),
        memfd_bytes=sum(size for target, size in files.values() if target.startswith("/memfd:")),
        shm_bytes=sum(size for target, size in files.values() if target.startswith("/dev/shm/")),
    )


def change_over(client: Client, *, num_changeovers: int) -> None:
    """Changes over to ROLLOUT and back to TRAIN."""
    for _ in range(num_changeovers // 2):
        client.acquire(Phase.ROLLOUT)
        client.acquire(Phase.TRAIN)


def growth(before: dict[str, Footprint], after: dict[str, Footprint]) -> dict[str, Footprint]:
    """Returns the growth of each process. Raises AssertionError if a process came or went."""
    assert after.keys() == before.keys(), "processes came or went"
    return {name: Footprint(*map(sub, astuple(after[name]), astuple(old))) for name, old in before.items()}


def _name(process: psutil.Process) -> str:
    words = process.cmdline()
    module = words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name if words else "?"
    return f"{module} {process.pid}"


def _open_files(pid: int) -> Iterator[tuple[tuple[int, int], tuple[str, int]]]:
    """Returns the open and mapped files by device and inode, with their names and physical bytes."""
    for folder in ("fd", "map_files"):
        for link in os.scandir(f"/proc/{pid}/{folder}"):
            with suppress(FileNotFoundError, PermissionError):
                status, target = os.stat(link.path), os.readlink(link.path)
                yield (status.st_dev, status.st_ino), (target, 512 * status.st_blocks)
