"""Injected faults as written in a configuration: "rollout@SYNC:4=kill" (docs/recovery.md lists all)."""

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
PUBLISHED, RECEIVED = "publish_weights", "receive"
"""Commands of a trainer rank and an engine rank whose results can be corrupted."""


class Action(StrEnum):
    """Action on a process at a failpoint."""

    KILL = "kill"
    """SIGKILL."""
    STOP = "stop"
    """SIGSTOP: the process stays alive without running, like one that hangs in the kernel."""
    SLOW = "slow"
    """Sleeps for a second."""
    HANG = "hang"
    """Blocks the thread forever; others continue."""
    FULL = "full"
    """Raises an OSError, as from a full disk."""
    CORRUPT = "corrupt"
    """Corrupts the result before its checksum is used."""


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


def check_failpoint(one: Failpoint, config: NodeConfig) -> None:
    """Raises ValueError if the node has no such process, or the process never reaches the point."""
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
            else f"{one.process} produces nothing to corrupt"
        )
        raise ValueError(f"names an unknown point: {what}")


def _points(config: NodeConfig) -> dict[str, tuple[str, ...]]:
    """Points of every process of the node."""
    ranks, engine_ranks = _commands(TrainerRankCommand), _commands(EngineRankCommand)
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
        raise ValueError('would permanently corrupt the parameters; it needs trainer.export = "copy"')
    if one.point == RECEIVED and not config.rollout.full_read_back:
        raise ValueError("is detected only by a plan's first sync; it needs rollout.full_read_back = true")
