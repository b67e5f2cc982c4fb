"""The commands in a service's log: the gate writes a line for each that was carried out or refused, and an audit reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from tasuki.rpc.logs import LINES_LOST

# The first one of a line: behind it there may be a caller's text, and before it what a library's progress bar has left.
_PREFIX = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ service=\S+ logger=\S+ ")
_LINE = re.compile(
    rf"event=(?:(?P<start>serving) service=|(?P<lost>{LINES_LOST})|command name=(?P<name>\S+) epoch=(?P<epoch>\d+)"
    r" sequence=(?P<sequence>\d+) outcome=(?P<outcome>\S+) seconds=\S+"
    r"(?: boot_id=(?P<boot_id>\S*) version=(?P<version>\d+|-))? request_id=(?P<request_id>.+))"
)


@dataclass(frozen=True, slots=True)
class LoggedCommand:
    """outcome: "OK" or the reason of the error. request_id: as Python's ascii() writes it.

    boot_id: of the life that carried it out. policy_version: that it published or received.
    """

    name: str
    epoch: int
    sequence: int
    outcome: str
    request_id: str
    boot_id: str = ""
    policy_version: int | None = None

    @property
    def is_stage(self) -> bool:
        """Whether it has a place in the coordinator's sequence."""
        return self.sequence > 0


@dataclass(slots=True)
class LoggedLife:
    """One life of a service, as far as its log goes."""

    commands: list[LoggedCommand] = field(default_factory=list)
    has_beginning: bool = False
    lacks_lines: bool = False
    """Whether lines could not be written, as on a full disk."""


def read_command_log(path: Path) -> list[LoggedLife]:
    """The lives in a log; none when there is no log, or nothing of a service in it."""
    lives = [LoggedLife()]
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        prefix = _PREFIX.search(line)
        found = _LINE.match(line, prefix.end() if prefix is not None else 0)
        if found is None:
            continue
        if found["start"]:
            lives.append(LoggedLife(has_beginning=True))
        elif found["lost"]:
            lives[-1].lacks_lines = True
        else:
            lives[-1].commands.append(_command(found))
    return [life for life in lives if life.commands or life.has_beginning or life.lacks_lines]


def _command(found: re.Match[str]) -> LoggedCommand:
    return LoggedCommand(
        name=found["name"],
        epoch=int(found["epoch"]),
        sequence=int(found["sequence"]),
        outcome=found["outcome"],
        request_id=found["request_id"],
        boot_id=found["boot_id"] or "",
        policy_version=int(found["version"]) if (found["version"] or "-") != "-" else None,
    )
