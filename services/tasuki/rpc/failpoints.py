"""Faults injected by recovery tests, such as "rollout@SYNC:4=kill" (docs/design/recovery.md); active where TASUKI_FAILPOINTS is set."""

import errno
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tasuki.config.environment import FAILPOINTS, failpoint_specs
from tasuki.config.paths import socket_dir
from tasuki.config.schema import NodeConfig
from tasuki.rpc.methods import METHODS
from tasuki.v1.ranks_pb2 import EngineRankCommand, TrainerRankCommand
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.stages import RING, Rpc, Service, stages_of

_SPEC = re.compile(
    r"(?P<process>[a-z]+[0-9]*)@(?P<point>[A-Za-z_.]+)(?::(?P<nth>[1-9][0-9]*))?=(?P<action>[a-z]+)"
    r"(?:\((?P<victim>[a-z]+[0-9]*)\))?"
)
_TRAINER = "tasuki.v1.TrainerService"
_TRAINER_COMMANDS = {method.method for method in METHODS.values() if method.service == _TRAINER and method.needs_deadline}
_LOG_WRITES = ("log.begin", "log.commit", "log.replace")
_JOURNAL_WRITES = ("intend", "intended", "note", "noted")
PUBLISHED, RECEIVED = "publish_weights", "receive"
"""Commands of a trainer rank and an engine rank whose results can be corrupted."""


class Action(StrEnum):
    """Action on a process at a failpoint."""

    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP: the process stays alive without running, like one that hangs in the kernel
    SLOW = "slow"  # sleeps for a second
    HANG = "hang"  # blocks the thread forever; others continue
    FULL = "full"  # raises an OSError, as from a full disk
    CORRUPT = "corrupt"  # corrupts the result before its checksum is used


@dataclass(frozen=True, slots=True)
class Failpoint:
    """`action`, applied when `process` reaches `point` for the `nth` time. victim: the process it is applied to."""

    process: str
    point: str
    nth: int
    action: Action
    victim: str


def parse_failpoint(spec: str) -> Failpoint:
    """Parses "rollout@SYNC=kill", "coordinator@SYNC.intended:3=stop" or "coordinator@SYNC.intended=kill(trainer1)".

    Raises ValueError.
    """
    parts = _SPEC.fullmatch(spec)
    if parts is None or parts["action"] not in list(Action):
        raise ValueError(f"is not PROCESS@POINT[:NTH]=ACTION with an action of {', '.join(Action)}")
    action, victim = Action(parts["action"]), parts["victim"] or parts["process"]
    if parts["victim"] and action not in (Action.KILL, Action.STOP):
        raise ValueError("names a victim, which only kill and stop support")
    return Failpoint(parts["process"], parts["point"], int(parts["nth"] or 1), action, victim)


def check_failpoints(config: NodeConfig) -> None:
    """Raises InvalidArgument for a failpoint that no process of the node reaches."""
    for spec in failpoint_specs() or ():
        try:
            _check(parse_failpoint(spec), config)
        except ValueError as error:
            raise InvalidArgument(FAILPOINTS, f"has {spec!r}, which {error}") from error


def _check(one: Failpoint, config: NodeConfig) -> None:
    points = _points(config)
    for process in (one.process, one.victim):
        if process not in points:
            raise ValueError(f"names {process}, but the node's processes are {', '.join(points)}")
    known = points[one.process]
    if one.action is Action.CORRUPT:
        known = tuple(point for point in known if point in (PUBLISHED, RECEIVED))
        if one.point == PUBLISHED and config.exports_parameters:
            raise ValueError(
                "would permanently corrupt the parameters; it needs trainer.param_dtype to differ from rollout.dtype"
            )
    if one.point not in known:
        raise ValueError(f"names an unknown point: {one.process} can {one.action} at {', '.join(known) or 'no point'}")


def _points(config: NodeConfig) -> dict[str, tuple[str, ...]]:
    """Points of every process of the node."""

    def with_ends(commands: Iterable[str]) -> tuple[str, ...]:
        return tuple(point for command in commands for point in (command, f"{command}.done"))

    ranks, engine_ranks = (
        with_ends(field.name for field in message.DESCRIPTOR.oneofs_by_name["command"].fields if field.name != "stop")
        for message in (TrainerRankCommand, EngineRankCommand)
    )
    return {
        "coordinator": tuple(f"{rule.stage}.{write}" for rule in RING for write in _JOURNAL_WRITES),
        "trainer": (
            *with_ends((*stages_of(Service.TRAINER), *sorted(_TRAINER_COMMANDS - {Rpc.PUBLISH_WEIGHTS}))),
            *_LOG_WRITES,
        ),
        **{f"trainer{rank}": ranks for rank in range(config.trainer.num_ranks)},
        "rollout": with_ends(stages_of(Service.ROLLOUT)),
        **{f"scheduler{rank}": engine_ranks for rank in range(config.num_engine_ranks)},
    }


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
    def of(cls, config: NodeConfig, process: str) -> "Failpoints":
        specs = failpoint_specs()
        return NO_FAILPOINTS if specs is None else cls(process, specs, folder=socket_dir(config.state_dir))

    def hit(self, point: str) -> None:
        """Runs the action planted at `point`, if any, except damage to data."""
        if self._folder is None:
            return
        self._hits[point] += 1
        for one in self._points:
            if one.action is not Action.CORRUPT and self._fires(one, point, self._hits[point]):
                if one.victim == one.process:
                    _act(one.action)
                for pulse in (self._folder / "pulse").glob(f"{one.victim}-*") if one.victim != one.process else ():
                    with suppress(ProcessLookupError):
                        os.kill(int(pulse.name.rpartition("-")[2]), _SIGNALS[one.action])
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
        if (one.point, one.nth) != (point, nth):
            return False
        try:
            (self._folder / f"fired-{one.process}-{point}-{nth}").touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            return False
        return True


def plant(folder: Path, process: str, point: str, action: Action) -> None:
    """Runs `action` the next time `process` of a running node hits `point`. folder: of its sockets."""
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
