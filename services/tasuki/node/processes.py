"""Stops a node, ends its processes, and removes what they leave, such as the node's copy of its model in shared memory."""

import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tasuki.config.lock import NODE_LOCK, TRAINING_LOCK, StateLock, holder
from tasuki.config.paths import model_copy_dir, socket_dir
from tasuki.config.schema import NodeConfig
from tasuki.memory.host import host_memory
from tasuki.models.folder_files import bytes_to_copy, model_files
from tasuki.wire.errors import DeadlineExceeded, NodeRunning
from tasuki.wire.process_tree import descendants, has_ended, parent_and_state, reap, stat_fields

_log = logging.getLogger("tasuki.node")
_SHM = Path("/dev/shm")  # noqa: S108 - looked into, never written to
_POLL_S = 0.02
_SCAN_EVERY_S = 10.0
_PF_EXITING = 0x4
EXIT_LIMIT_S = 120.0
"""Longest wait for processes that are exiting, whose pinned memory and memory of a GPU the kernel frees."""
SERVICE_VARIABLE = "TASUKI_SERVICE"
"""Environment variable with the service's name, set in all its processes, so that orphans can be attributed."""


def is_exiting(pid: int) -> bool:
    """Whether the process was killed or has ended, but the kernel still frees its memory. No signal makes that faster."""
    fields = stat_fields(pid)
    if not fields or (fields[0] in "ZX" and int(fields[17]) <= 1):  # the last thread of a zombie may still hold the memory
        return False
    was_killed = int(fields[28]) >> (signal.SIGKILL - 1) & 1  # pending while it is in a driver
    return bool(int(fields[6]) & _PF_EXITING or was_killed)


def cannot_be_killed(pid: int) -> str:
    """Why a process that is exiting is still there, for a message."""
    return f"pid {pid} is exiting and cannot be killed further: the kernel is freeing its memory"


def continue_children() -> None:
    """Continues this process's stopped children, which could not end with it."""
    continue_stopped(pid for pid in descendants(os.getpid()) if parent_and_state(pid)[0] == os.getpid())


def continue_stopped(pids: Iterable[int]) -> None:
    """Sends SIGCONT to those that are stopped."""
    for pid in pids:
        if parent_and_state(pid)[1] == "T":
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def end_descendants(*, grace_s: float, kill_s: float, watch: Callable[[dict[int, int]], object]) -> None:
    """Gives the processes below this one `grace_s` to end, then sends SIGKILL for up to `kill_s` until none is left.

    Waits longer, up to EXIT_LIMIT_S, while one of them is exiting. `watch` is called repeatedly with the result of `reap`.
    """
    deadline = time.monotonic() + grace_s
    while descendants(os.getpid()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        watch(reap())
    left = _kill(lambda: descendants(os.getpid()), kill_s=kill_s, watch=watch)
    if left:
        _log.error("event=left pids=%s", ",".join(map(str, left)))


def kill_service(name: str, *, kill_s: float, watch: Callable[[dict[int, int]], object]) -> int:
    """Kills every process of the service below this one. Returns their number once they are gone.

    Waits up to `kill_s`, and up to EXIT_LIMIT_S while one is exiting; then raises DeadlineExceeded. `watch` gets the results of `reap`.
    """
    killed: set[int] = set()
    left: set[int] = set()
    mark = f"{SERVICE_VARIABLE}={name}".encode()

    def remaining() -> list[int]:
        nonlocal left
        below = descendants(os.getpid())
        ours = {pid for pid in below if mark in _environment(pid)}
        killed.update(ours)
        # The environment of an exiting process cannot be read: one that was not seen before may be the service's.
        left = ours | {pid for pid in below if is_exiting(pid) or (pid in left and not has_ended(pid))}
        return sorted(left)

    if survivors := _kill(remaining, kill_s=kill_s, watch=watch):
        pid = next(filter(is_exiting, survivors), survivors[0])
        why = cannot_be_killed(pid) if is_exiting(pid) else f"pid {pid} is still running"
        raise DeadlineExceeded(f"{name} has not ended after SIGKILL: {why}", service=name, pid=pid)
    return len(killed)


def _kill(remaining: Callable[[], list[int]], *, kill_s: float, watch: Callable[[dict[int, int]], object]) -> list[int]:
    """Sends SIGKILL until `remaining` returns nothing, for `kill_s`, or EXIT_LIMIT_S if one is exiting. Returns what is left.

    A process that has an exiting one below it may be waiting for its exit code: it is spared until `kill_s` after that has ended.
    """
    started = time.monotonic()
    ends, spared = started + kill_s, dict[int, float]()
    is_told = False
    while left := remaining():
        now = time.monotonic()
        exiting = list(filter(is_exiting, left))
        if exiting:
            spared |= {pid: now + kill_s for pid in left if any(map(is_exiting, descendants(pid)))}
            ends = now + 2 * kill_s
        if now > (started + EXIT_LIMIT_S if exiting else ends):
            break
        if exiting and now - started > kill_s and not is_told:
            _log.warning("event=waits_for_exit pids=%s", ",".join(map(str, exiting)))
            is_told = True
        for pid in left:
            if now >= spared.get(pid, now):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
        watch(reap())
    return left


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # the process has just ended
        return []


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


class ResourceTracker:
    """The run folder with its sockets, the copy of the model, and files in /dev/shm used by the processes below this one."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._others = shared_memory()
        self._seen = self._others
        self._ours: set[Path] = set()
        self._next_scan = 0.0

    def poll(self) -> None:
        """Scans if /dev/shm has something new, and periodically; cheap otherwise."""
        present = shared_memory()
        if present - self._seen or time.monotonic() >= self._next_scan:
            self.scan()
            self._seen = present
            self._next_scan = time.monotonic() + _SCAN_EVERY_S

    def scan(self) -> None:
        """Records which shared memory the processes below this one use, since that is unknown once they have ended."""
        self._ours |= shared_memory_of(descendants(os.getpid())) - self._others

    def remove(self) -> None:
        """Removes the resources; call it once none of the processes is left."""
        for path in self._ours:
            path.unlink(missing_ok=True)
        remove_model_copy(self._state_dir)
        shutil.rmtree(socket_dir(self._state_dir), ignore_errors=True)


@contextmanager
def preloaded_model(config: NodeConfig, *, tell: Callable[[str], None]) -> Iterator[None]:
    """Copies the model from a network file system. Removes the copy if the block, or copying, ends with an exception.

    Replaces a copy that a killed node left; call it with the node's lock held. Services read `model.path` if the copy fails. Raises as
    model_files.
    """
    remove_model_copy(config.state_dir)
    place = model_copy_dir(config.state_dir)
    try:
        if needed := bytes_to_copy(config.model.path, host_bytes=host_memory().total_bytes):
            started = time.monotonic()
            try:
                _copy(config.model.path, place)
                tell(f"copied {needed} bytes of {config.model.path} to {place} in {time.monotonic() - started:.1f} s")
            except OSError as error:
                remove_model_copy(config.state_dir)
                tell(f"{config.model.path} is not copied to {place}: {error}")
        yield
    except BaseException:
        remove_model_copy(config.state_dir)
        raise


def remove_model_copy(state_dir: Path) -> None:
    """Removes the copy, also an unfinished one; call it once no service reads it."""
    place = model_copy_dir(state_dir)
    for folder in (place, _unfinished(place)):
        shutil.rmtree(folder, ignore_errors=True)


def _unfinished(place: Path) -> Path:
    return place.with_name(f"{place.name}.part")


def _copy(folder: Path, place: Path) -> None:
    """Copies the files that services read, following links. A service never sees an unfinished copy. Raises OSError, also if the folder
    exists, as another user's may."""
    _unfinished(place).mkdir(mode=0o700)
    for file in model_files(folder):
        shutil.copyfile(file, _unfinished(place) / file.name)
    _unfinished(place).rename(place)


STOP_TIMEOUT_S = 10.0
_KILL_S = 3.0
_LOOK_EVERY_S = 0.1


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
            _signal(pid, signal.SIGTERM)
            _signal(pid, signal.SIGCONT)  # a stopped process would not receive SIGTERM
        if pid != guard_pid:  # which signs the lock after its supervisor
            guard_pid = parent_and_state(pid)[0] or guard_pid
        is_guard_left = (pid == guard_pid or has_ended(pid)) and _shares_lock(guard_pid, state_dir)
        if is_guard_left:
            _signal(guard_pid, signal.SIGCONT)
            below = descendants(guard_pid)
            if time.monotonic() > deadline and all(has_ended(one) and not is_exiting(one) for one in below):
                _signal(guard_pid, signal.SIGKILL)
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
        time.sleep(_LOOK_EVERY_S)
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


def _signal(pid: int, number: signal.Signals) -> None:
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
