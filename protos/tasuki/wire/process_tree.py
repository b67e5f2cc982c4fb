"""The tree of processes: who is below whom, and a nest that lets none of them outlive its work."""

import ctypes  # noqa: TID251 - prctl has no other door in Python, and is no part of the native library
import os
import random
import resource
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MARKED_LIMIT = resource.RLIMIT_RTTIME
"""Of threads with real-time scheduling, in microseconds. Forks and programs inherit it, whatever they do to environment and session."""
_KILL_S = 5.0
_POLL_S = 0.005
_LOOK_EVERY_MS = 1000
_NEST_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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
            parent, _ = parent_and_state(int(entry.name))
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def parent_and_state(pid: int) -> tuple[int, str]:
    """The parent, and the kernel's state letter: "T" for stopped, "Z" and "X" for ended."""
    fields = stat_fields(pid)
    return (int(fields[1]), fields[0]) if fields else (0, "X")


def has_ended(pid: int) -> bool:
    """Whether the process is gone or a zombie."""
    return parent_and_state(pid)[1] in "ZX"


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third, the state, on; empty if the process is gone."""
    try:
        # The name in parentheses may contain anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


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


def new_mark() -> int:
    """A limit of centuries, which no other process has."""
    most = resource.getrlimit(_MARKED_LIMIT)[1]
    most = most if most != resource.RLIM_INFINITY else 2**62
    return random.SystemRandom().randrange(most // 2, most)


def kill_marked(mark: int) -> None:
    """Kills what a nest with this mark has started, wherever it is in the tree."""
    ends = time.monotonic() + _KILL_S
    while time.monotonic() < ends:
        found = False
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is another user's
                pid = int(entry.name)
                if resource.prlimit(pid, _MARKED_LIMIT)[1] == mark and not has_ended(pid):
                    os.kill(pid, signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(_POLL_S)


def run_nested(work: Callable[[], object], *, lifeline_fd: int, mark: int) -> NoReturn:
    """Runs `work` in a child. Once it has ended, or nobody holds the other end of the lifeline, kills all that it has left, and exits.

    Whatever the child's processes do, they stay below this one, which adopts their orphans. So do those of a child that kills its
    parent, as there are two such nests. The exit code is the child's, or 128 and the signal that has ended it. mark: of `new_mark`.
    """
    resource.setrlimit(_MARKED_LIMIT, (mark, mark))

    def innermost() -> None:
        os.close(lifeline_fd)
        work()

    _nest(lambda: _nest(innermost, lifeline_fd=lifeline_fd), lifeline_fd=lifeline_fd)


def _nest(work: Callable[[], object], *, lifeline_fd: int) -> NoReturn:
    parent = os.getppid()
    die_with_parent(parent, signal.SIGCONT)  # wakes a nest that its own child has stopped
    adopt_orphans()
    for number in _NEST_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    nest = os.getpid()
    child = os.fork()
    if not child:
        os.setsid()  # a signal to its own group reaches nobody else
        for number in _NEST_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(nest, signal.SIGKILL)
        work()
        os._exit(0)
    ended: dict[int, int] = {}
    poll = select.poll()
    poll.register(lifeline_fd, 0)
    poll.register(os.pidfd_open(child), select.POLLIN)
    while not poll.poll(_LOOK_EVERY_MS) and os.getppid() == parent:
        ended |= reap()
    # Ahead of what a bomb of forks has started, where the system allows it: each has a share of the processors as large as this.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    known, ends = set[int](), time.monotonic() + _KILL_S
    # A look at /proc may miss a process whose parent ends meanwhile, but orphans are children of this one.
    while _has_children():
        begun, found = time.monotonic(), descendants(nest)
        if begun > ends and known.issuperset(found):
            break  # one in a driver cannot be killed
        known.update(found)
        for one in found:
            for kill in (os.killpg, os.kill):  # the forks of a group at once
                with suppress(ProcessLookupError, PermissionError):
                    kill(one, signal.SIGKILL)
        time.sleep(max(_POLL_S, time.monotonic() - begun))  # for them to end
        ended |= reap()
    code = ended.get(child, -signal.SIGKILL)
    os._exit(code if code >= 0 else 128 - code)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
