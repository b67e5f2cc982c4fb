"""Faults on request, as a configuration writes them: "rollout@SYNC:4=kill" (docs/recovery.md has all)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tasuki.v1.ranks_pb2 import EngineRankCommand, TrainerRankCommand

if TYPE_CHECKING:
    from tasuki.config.schema import NodeConfig

_SPEC = re.compile(
    r"(?P<process>[a-z]+[0-9]*)@(?P<point>[A-Za-z_.]+)(?::(?P<nth>[1-9][0-9]*))?=(?P<action>[a-z]+)"
    r"(?:\((?P<victim>[a-z]+[0-9]*)\))?"
)
_ROLLOUT_STAGES = ("RESUME_WEIGHTS", "SYNC", "RESUME_KV", "DRAIN", "PAUSE_KV", "PAUSE_WEIGHTS")
_TRAINER_STAGES = ("LOAD_WEIGHTS", "OFFLOAD", "LOAD_TRAINER")
_TRAINER_COMMANDS = (
    "ForwardBackward",
    "OptimStep",
    "DiscardGradients",
    "BeginRun",
    "WithdrawWeights",
    "SaveCheckpoint",
    "LoadCheckpoint",
    "ExportModel",
)
_LOG_WRITES = ("log.begin", "log.commit", "log.replace")
_JOURNAL_WRITES = ("intend", "intended", "note", "noted")
_CACHE_MOVES = ("grow_cache.mapped", "shrink_cache.served")
"""In the middle of the commands: when a part is mapped and not served, and when slots are withdrawn whose pages are there."""
PUBLISHED, RECEIVED = "publish_weights", "receive"
"""Commands of a trainer rank and of an engine rank, whose results can be damaged."""


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
    """What the process has made is damaged, behind the back of those who sum it up."""


@dataclass(frozen=True, slots=True)
class Failpoint:
    """`process` comes to `point` for the `nth` time: `action`. victim: whom it strikes."""

    process: str
    point: str
    nth: int
    action: Action
    victim: str


def parse_failpoint(spec: str) -> Failpoint:
    """Reads "rollout@SYNC=kill", "coordinator@SYNC.intended:3=stop" or "coordinator@SYNC.intended=kill(trainer1)".

    Raises ValueError.
    """
    parts = _SPEC.fullmatch(spec)
    if parts is None or parts["action"] not in list(Action):
        raise ValueError(f"is not PROCESS@POINT[:NTH]=ACTION with an action of {', '.join(Action)}")
    action, victim = Action(parts["action"]), parts["victim"] or parts["process"]
    if parts["victim"] and action not in (Action.KILL, Action.STOP):
        raise ValueError("asks what only kill and stop can do to another process")
    return Failpoint(parts["process"], parts["point"], int(parts["nth"] or 1), action, victim)


def check_failpoint(one: Failpoint, config: NodeConfig) -> None:
    """Raises ValueError when the node has no such process, or its process never comes to that point."""
    points = _points(config)
    for process in (one.process, one.victim):
        if process not in points:
            raise ValueError(f"names {process}, but the node's processes are {', '.join(points)}")
    known = points[one.process]
    if one.action is Action.CORRUPT:
        known = tuple(point for point in known if point in (PUBLISHED, RECEIVED))
        _check_damage_is_noticed(one, config)
    if one.point not in known:
        what = (
            f"{one.process} can be asked to {one.action} at {', '.join(known)}"
            if known
            else f"{one.process} makes nothing to corrupt"
        )
        raise ValueError(f"names a point that is none: {what}")


def _points(config: NodeConfig) -> dict[str, tuple[str, ...]]:
    """Of every process of the node."""
    ranks = _commands(TrainerRankCommand)
    engine_ranks = (*_commands(EngineRankCommand), *_CACHE_MOVES)
    return {
        "coordinator": tuple(f"{stage}.{write}" for stage in (*_TRAINER_STAGES, *_ROLLOUT_STAGES) for write in _JOURNAL_WRITES),
        "trainer": (*_with_ends((*_TRAINER_STAGES, *_TRAINER_COMMANDS)), *_LOG_WRITES),
        **{f"trainer{rank}": ranks for rank in range(config.trainer.num_ranks)},
        "rollout": _with_ends(_ROLLOUT_STAGES),
        **{f"scheduler{rank}": engine_ranks for rank in range(config.num_engine_ranks)},
    }


def _commands(message: type[EngineRankCommand | TrainerRankCommand]) -> tuple[str, ...]:
    fields = message.DESCRIPTOR.oneofs_by_name["command"].fields
    return _with_ends(tuple(field.name for field in fields if field.name != "stop"))


def _with_ends(commands: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(point for command in commands for point in (command, f"{command}.done"))


def _check_damage_is_noticed(one: Failpoint, config: NodeConfig) -> None:
    if one.point == PUBLISHED and config.exports_parameters:
        raise ValueError('would damage the parameters themselves, for good; it needs trainer.export = "copy"')
    if one.point == RECEIVED and not config.rollout.full_read_back:
        raise ValueError("is noticed at a plan's first sync alone; it needs rollout.full_read_back = true")
