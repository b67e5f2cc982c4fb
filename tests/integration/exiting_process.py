"""A process that is exiting for as long as a test wants.

The init of a pid namespace exits once all its processes are reaped, and a traced one is reaped after its tracer, which is the test.
"""

import ctypes
import os
import time
from collections.abc import Callable

_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000
_PTRACE_SEIZE = 0x4206
_WALL = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def fork_init() -> tuple[int, int]:
    """Forks the init of a new pid namespace, and below it a process. Returns their pids; raises OSError where that is not allowed.

    Later children of the caller are in the namespace, too.
    """
    if _libc.unshare(_CLONE_NEWPID) != 0 and _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWPID) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    init = os.fork()
    if init == 0:
        os.fork()
        while True:
            time.sleep(600)
    children: list[str] = []
    while not children:
        with open(f"/proc/{init}/task/{init}/children", encoding="ascii") as file:
            children = file.read().split()
    return init, int(children[0])


def hold(traced: int) -> Callable[[], object]:
    """Keeps the init above `traced` from ending, once it is killed, until the returned function is called in the same thread."""
    if _libc.ptrace(_PTRACE_SEIZE, traced, None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    return lambda: os.waitpid(traced, _WALL)
