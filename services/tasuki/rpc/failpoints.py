"""Faults on request, compiled in: what a test of recovery needs, and what nothing else may switch on (`unsafe = true`)."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tasuki.config.places import socket_dir
from tasuki.config.schema import NodeConfig
from tasuki.wire.errors import InvalidArgument

_SPEC = re.compile(
    r"(?P<process>[a-z]+\d*)@(?P<point>[A-Za-z_.]+)(?::(?P<nth>[1-9]\d*))?=(?P<action>[a-z]+)"
    r"(?:\((?P<victim>[a-z]+\d*)\))?"
)


class Action(StrEnum):
    """What happens to the process that comes to a failpoint."""

    KILL = "kill"
    """SIGKILL."""
    STOP = "stop"
    """SIGSTOP: the process is there and does nothing any more, as one that hangs in the kernel."""
    SLOW = "slow"
    """A second passes."""
    HANG = "hang"
    """The thread that came there waits for ever; the others go on."""
    FULL = "full"
    """An OSError, as of a disk without room."""
    CORRUPT = "corrupt"
    """`hit` returns True, and its caller damages what it has made."""


_SIGNALS = {Action.KILL: signal.SIGKILL, Action.STOP: signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Failpoint:
    """`process` comes to `point` for the `nth` time: `action`, once in the life of the node. `victim`: whom it strikes."""

    process: str
    point: str
    nth: int
    action: Action
    victim: str
    marker: Path


def parse_failpoint(spec: str, *, folder: Path) -> Failpoint:
    """Reads "rollout@SYNC=kill", "coordinator@SYNC.intended:3=stop" or "coordinator@SYNC.intended=kill(trainer1)".

    Raises InvalidArgument.
    """
    parts = _SPEC.fullmatch(spec)
    if parts is None or parts["action"] not in list(Action):
        raise InvalidArgument("failpoints", f"{spec!r} is not PROCESS@POINT[:NTH]=ACTION with an action of {', '.join(Action)}")
    if parts["victim"] and parts["action"] not in _SIGNALS:
        raise InvalidArgument("failpoints", f"{spec!r}: of another process only {' and '.join(_SIGNALS)} can be asked")
    marker = folder / f"fired-{parts['process']}-{parts['point']}-{parts['nth'] or 1}"
    return Failpoint(
        parts["process"],
        parts["point"],
        int(parts["nth"] or 1),
        Action(parts["action"]),
        parts["victim"] or parts["process"],
        marker,
    )


class Failpoints:
    """The failpoints of one process; none in a node that was not made for tests."""

    def __init__(self, process: str, specs: Sequence[str] = (), *, folder: Path | None = None) -> None:
        """process: e.g. "coordinator", "trainer1" for rank 1, "rollout", "scheduler0". folder: remembers what has fired, and is where
        `plant` puts more; None when there is to be nothing."""
        self._process, self._folder = process, folder
        self._points = [one for spec in specs if folder and (one := parse_failpoint(spec, folder=folder)).process == process]
        self._hits: Counter[str] = Counter()

    @classmethod
    def of(cls, config: NodeConfig, process: str) -> Failpoints:
        return cls(process, config.failpoints, folder=socket_dir(config.state_dir)) if config.unsafe else NO_FAILPOINTS

    def hit(self, point: str) -> bool:
        """Comes to `point`. False, unless what the caller makes is to be damaged."""
        if self._folder is None:
            return False
        self._hits[point] += 1
        for one in self._points:
            if one.point == point and one.nth == self._hits[point] and _is_first(one.marker):
                return self._strike(one)
        for action in Action:
            if _is_taken(_planted(self._folder, self._process, point, action)):
                return _act(action)
        return False

    def _strike(self, point: Failpoint) -> bool:
        if point.victim == point.process:
            return _act(point.action)
        assert self._folder is not None
        for pulse in (self._folder / "pulse").glob(f"{point.victim}-*"):
            with suppress(ProcessLookupError):
                os.kill(int(pulse.name.rpartition("-")[2]), _SIGNALS[point.action])
        return False


def plant(folder: Path, process: str, point: str, action: Action) -> None:
    """The next time that `process` of a running, unsafe node comes to `point`: `action`. folder: its sockets'."""
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
    """Whether nobody was here before: a process that was started anew must not die of the same failpoint again."""
    try:
        marker.touch(mode=0o600, exist_ok=False)
    except FileExistsError:
        return False
    return True


def _act(action: Action) -> bool:
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
            return True
    return False
