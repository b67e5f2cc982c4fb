"""Linux's means against orphans: subreaper, death signal, and the tree of processes below one."""

from __future__ import annotations

import ctypes  # noqa: TID251 - prctl has no other door in Python, and is no part of the native library
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SHM = Path("/dev/shm")  # noqa: S108 - looked into, never written to
_POLL_S = 0.02
SERVICE_VARIABLE = "TASUKI_SERVICE"
"""In the environment of every process of a service: its name. A process that has lost its parent is still known by it."""
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Has the kernel send `number` to this process when its parent ends, however that ends. Not inherited by children."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # it ended before the call
        os.kill(os.getpid(), number)


def descendants(pid: int) -> list[int]:
    """Every process below `pid` that is not reaped yet, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has just ended
                # The name in parentheses may hold anything; the state and the parent follow the last one.
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def parent_and_state(pid: int) -> tuple[int, str]:
    """The parent, and the kernel's letter for what the process does: "T" when it is stopped, "Z" and "X" when it has ended."""
    try:
        # The name in parentheses may hold anything.
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return 0, "X"
    return int(parent), state


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or only waits to be reaped."""
    return parent_and_state(pid)[1] in "ZX"


def end_descendants(*, grace_s: float, kill_s: float, watch: Callable[[dict[int, int]], None]) -> None:
    """Gives the processes below this one `grace_s` to end by themselves, then `kill_s` of SIGKILL until none is left.

    `watch` is called all the while, with what `reap` returns.
    """
    started = time.monotonic()
    while (left := descendants(os.getpid())) and time.monotonic() < started + grace_s + kill_s:
        for pid in left if time.monotonic() > started + grace_s else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
        watch(reap())


def kill_service(name: str, *, kill_s: float, watch: Callable[[dict[int, int]], None]) -> int:
    """Kills every process below this one that belongs to the service, and returns when they are gone, or after `kill_s`.

    `watch` gets what `reap` returns. Returns how many there were.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + kill_s
    while (left := [pid for pid in descendants(os.getpid()) if _belongs_to(pid, name)]) and time.monotonic() < deadline:
        killed.update(left)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
        watch(reap())
    return len(killed)


def _belongs_to(pid: int, service: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has just ended
        return False
    return f"{SERVICE_VARIABLE}={service}".encode() in environment


def reap() -> dict[int, int]:
    """Exit codes of the children that have ended since the last call, by pid; -N for death by signal N."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def shared_memory() -> set[Path]:
    """Everything in /dev/shm."""
    return set(_SHM.iterdir()) if _SHM.is_dir() else set()


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Files in /dev/shm that any of the processes has mapped.

    By inode: a named semaphore is mapped under a temporary name, before it gets its own.
    """
    paths: dict[int, Path] = {}
    for path in shared_memory():
        with suppress(OSError):  # it has just been removed
            paths[path.stat().st_ino] = path
    mapped: set[int] = set()
    for pid in pids if paths else ():
        with suppress(OSError):  # it has just ended
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if f" {_SHM}/" in line:
                    mapped.add(int(line.split(maxsplit=5)[4]))
    return {paths[inode] for inode in mapped & paths.keys()}


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
