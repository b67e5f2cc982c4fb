"""Stops a node, and removes what it left if its supervisor was killed."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tasuki.config.lock import NODE_LOCK, TRAINING_LOCK, StateLock, holder
from tasuki.config.paths import socket_dir
from tasuki.node.processes import EXIT_LIMIT_S, cannot_be_killed, is_exiting, remove_model_copy
from tasuki.wire.errors import DeadlineExceeded, NodeRunning
from tasuki.wire.process_tree import descendants, has_ended, parent_and_state

STOP_TIMEOUT_S = 10.0
_KILL_S = 3.0
_POLL_S = 0.1


def to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def stop_node(state_dir: Path, *, tell: Callable[[str], None] = to_stderr) -> bool:
    """Stops the node in `state_dir` and returns once all its processes have ended; returns False if none ran.

    Continues a supervisor or guard that was stopped with SIGSTOP. Kills a guard that does not end after its supervisor.
    While a process of the node is exiting, waits up to EXIT_LIMIT_S, and tells of it once. Raises DeadlineExceeded naming the process
    that keeps the node from ending.
    """
    asked: set[int] = {os.getpid()}
    started = time.monotonic()
    deadline = started + STOP_TIMEOUT_S
    guard_pid = 0
    is_told = False
    while (pid := holder(state_dir, name=NODE_LOCK)) is not None:
        # While a node starts, the lock passes from the starting process to the supervisor.
        if pid and pid not in asked:
            asked.add(pid)
            _kill(pid, signal.SIGTERM)
            _kill(pid, signal.SIGCONT)  # a stopped process would not receive SIGTERM
        if pid != guard_pid:  # which signs the lock after its supervisor
            guard_pid = parent_and_state(pid)[0] or guard_pid
        is_guard_left = (pid == guard_pid or has_ended(pid)) and _shares_lock(guard_pid, state_dir)
        if is_guard_left:
            _kill(guard_pid, signal.SIGCONT)
            below = descendants(guard_pid)
            if time.monotonic() > deadline and all(has_ended(one) and not is_exiting(one) for one in below):
                _kill(guard_pid, signal.SIGKILL)
        now = time.monotonic()
        roots = (pid, guard_pid if is_guard_left else 0)
        exiting_pid = next((one for root in roots if root for one in (root, *descendants(root)) if is_exiting(one)), 0)
        if exiting_pid:
            # The supervisor, which waits for it, then has its usual time.
            deadline = max(deadline, min(now + STOP_TIMEOUT_S, started + EXIT_LIMIT_S))
            if now > started + STOP_TIMEOUT_S and not is_told:
                tell(f"waiting for pid {exiting_pid}, which is exiting: the kernel is freeing its memory")
                is_told = True
        if now > deadline + (_KILL_S if is_guard_left else 0.0):
            why = cannot_be_killed(exiting_pid) if exiting_pid else _stuck(pid)
            raise DeadlineExceeded(f"the node has not stopped in {deadline - started:.0f} s: {why}", pid=exiting_pid or pid)
        time.sleep(_POLL_S)
    # Of a supervisor and a guard that were killed at once, unless a service runs on its own.
    names = {path.stem for path in state_dir.glob("*.lock")}
    if NODE_LOCK in names and all(holder(state_dir, name=name) is None for name in names - {TRAINING_LOCK}):
        with suppress(NodeRunning), StateLock.take(state_dir, name=NODE_LOCK):
            remove_model_copy(state_dir)
            shutil.rmtree(socket_dir(state_dir), ignore_errors=True)
    return len(asked) > 1


def _shares_lock(pid: int, state_dir: Path) -> bool:
    """Whether the process has the node's lock open, as the supervisor and its guard do."""
    lock = (state_dir / f"{NODE_LOCK}.lock").resolve()
    try:
        return any(file.resolve() == lock for file in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # the process has just ended
        return False


def _kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _stuck(pid: int) -> str:
    """Why a node whose lock `pid` holds does not end, and what to do about it."""
    parent, state = parent_and_state(pid)
    # A supervisor that has ended remains until its guard, which shares the lock, ends.
    waits_for = parent if state == "Z" else pid
    if parent_and_state(waits_for)[1] == "T":
        return f"pid {waits_for} is stopped; continue it with kill -CONT {waits_for}, or end it with kill -KILL {waits_for}"
    return f"pid {waits_for} is still running; end it with kill -KILL {waits_for}, which also ends its children"
