"""Injects faults for recovery tests. They are compiled in, and need `unsafe = true`."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tasuki.config.failpoints import Action, Failpoint, parse_failpoint
from tasuki.config.paths import socket_dir
from tasuki.config.schema import NodeConfig

_SIGNALS = {Action.KILL: signal.SIGKILL, Action.STOP: signal.SIGSTOP}


class Failpoints:
    """Failpoints of one process; inactive in a node that was not made for tests."""

    def __init__(self, process: str, specs: Sequence[str] = (), *, folder: Path | None = None) -> None:
        """process: e.g. "coordinator", "trainer1" for rank 1, "rollout", "scheduler0". folder: keeps the record of
        those that fired, and those added by `plant`; None for no failpoints."""
        self._process, self._folder = process, folder
        self._points = [one for spec in specs if folder and (one := parse_failpoint(spec)).process == process]
        self._hits: Counter[str] = Counter()
        self._made: Counter[str] = Counter()

    @classmethod
    def of(cls, config: NodeConfig, process: str) -> Failpoints:
        return cls(process, config.failpoints, folder=socket_dir(config.state_dir)) if config.unsafe else NO_FAILPOINTS

    def hit(self, point: str) -> None:
        """Runs the action planted at `point`, if any, except damage to data."""
        if self._folder is None:
            return
        self._hits[point] += 1
        for one in self._points:
            if one.action is not Action.CORRUPT and self._fires(one, point, self._hits[point]):
                self._strike(one)
                return
        for action in (action for action in Action if action is not Action.CORRUPT):
            if _is_taken(_planted(self._folder, self._process, point, action)):
                _act(action)
                return

    def corrupts(self, point: str) -> bool:
        """Whether the caller shall damage the data it made at `point`."""
        if self._folder is None:
            return False
        self._made[point] += 1
        asked = [one for one in self._points if one.action is Action.CORRUPT and self._fires(one, point, self._made[point])]
        return bool(asked) or _is_taken(_planted(self._folder, self._process, point, Action.CORRUPT))

    def _fires(self, one: Failpoint, point: str, nth: int) -> bool:
        """Whether it fires now and never did before: a restarted process must not die of the same failpoint again."""
        assert self._folder is not None
        return one.point == point and one.nth == nth and _is_first(self._folder / f"fired-{one.process}-{point}-{nth}")

    def _strike(self, point: Failpoint) -> None:
        if point.victim == point.process:
            _act(point.action)
            return
        assert self._folder is not None
        for pulse in (self._folder / "pulse").glob(f"{point.victim}-*"):
            with suppress(ProcessLookupError):
                os.kill(int(pulse.name.rpartition("-")[2]), _SIGNALS[point.action])


def plant(folder: Path, process: str, point: str, action: Action) -> None:
    """Runs `action` the next time `process` of a running, unsafe node hits `point`. folder: of its sockets."""
    _planted(folder, process, point, action).touch(mode=0o600)


def _planted(folder: Path, process: str, point: str, action: Action) -> Path:
    return folder / f"planted-{process}-{point}-{action}"


def _is_taken(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


NO_FAILPOINTS = Failpoints("")


def _is_first(marker: Path) -> bool:
    try:
        marker.touch(mode=0o600, exist_ok=False)
    except FileExistsError:
        return False
    return True


def _act(action: Action) -> None:
    match action:
        case Action.KILL | Action.STOP:
            os.kill(os.getpid(), _SIGNALS[action])
        case Action.SLOW:
            time.sleep(1.0)
        case Action.HANG:
            while True:
                time.sleep(3600.0)
        case Action.FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case Action.CORRUPT:
            raise AssertionError("is the caller's to do")
