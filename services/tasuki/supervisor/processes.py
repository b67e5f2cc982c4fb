"""Linux features against orphans: subreaper, parent death signal, and the process tree."""

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
"""Environment variable with the service's name, set in all its processes, so that orphans can be attributed."""
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Makes this process the new parent of orphaned descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Asks the kernel to send `number` to this process when its parent ends. Not inherited by children."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # it ended before the call
        os.kill(os.getpid(), number)


def descendants(pid: int) -> list[int]:
    """All processes below `pid` that are not reaped, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # the process has just ended
                # The name in parentheses may contain anything; state and parent follow the last parenthesis.
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def parent_and_state(pid: int) -> tuple[int, str]:
    """The parent, and the kernel's state letter: "T" for stopped, "Z" and "X" for ended."""
    try:
        # The name in parentheses may contain anything.
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return 0, "X"
    return int(parent), state


def has_ended(pid: int) -> bool:
    """Whether the process is gone or a zombie."""
    return parent_and_state(pid)[1] in "ZX"


def continue_children() -> None:
    """Continues this process's stopped children, which could not end with it."""
    for pid in descendants(os.getpid()):
        if parent_and_state(pid) == (os.getpid(), "T"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def end_descendants(*, grace_s: float, kill_s: float, watch: Callable[[dict[int, int]], None]) -> None:
    """Gives the processes below this one `grace_s` to end, then sends SIGKILL for up to `kill_s` until none is left.

    `watch` is called repeatedly with the result of `reap`.
    """
    started = time.monotonic()
    while (left := descendants(os.getpid())) and time.monotonic() < started + grace_s + kill_s:
        for pid in left if time.monotonic() > started + grace_s else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
        watch(reap())


def kill_service(name: str, *, kill_s: float, watch: Callable[[dict[int, int]], None]) -> int:
    """Kills every process of the service below this one. Returns once they are gone, or after `kill_s`.

    `watch` gets the results of `reap`. Returns the number of processes killed.
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
    except OSError:  # the process has just ended
        return False
    return f"{SERVICE_VARIABLE}={service}".encode() in environment


def reap() -> dict[int, int]:
    """Exit codes by pid of children that ended since the last call; -N for signal N."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def shared_memory() -> set[Path]:
    """All files in /dev/shm."""
    return set(_SHM.iterdir()) if _SHM.is_dir() else set()


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Files in /dev/shm mapped by any of the processes.

    Compared by inode: a named semaphore is mapped under a temporary name before it is renamed.
    """
    paths: dict[int, Path] = {}
    for path in shared_memory():
        with suppress(OSError):  # the file was just removed
            paths[path.stat().st_ino] = path
    mapped: set[int] = set()
    for pid in pids if paths else ():
        with suppress(OSError):  # the process has just ended
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if f" {_SHM}/" in line:
                    mapped.add(int(line.split(maxsplit=5)[4]))
    return {paths[inode] for inode in mapped & paths.keys()}


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
