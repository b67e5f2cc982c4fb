"""The commands in a service's log: the gate writes a line for each that was carried out or refused, and an audit reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(
    r"event=(?:(?P<start>serving) service=|command name=(?P<name>\S+) epoch=(?P<epoch>\d+) sequence=(?P<sequence>\d+)"
    r" outcome=(?P<outcome>\S+) seconds=\S+ request_id=(?P<request_id>.+))"
)


@dataclass(frozen=True, slots=True)
class LoggedCommand:
    """outcome: "OK" or the reason of the error. request_id: as Python's ascii() writes it."""

    name: str
    epoch: int
    sequence: int
    outcome: str
    request_id: str


def read_command_log(path: Path) -> list[list[LoggedCommand]]:
    """The commands in a log, one list for each life of the service in it; none when there is no log."""
    lives: list[list[LoggedCommand]] = [[]]
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        found = _LINE.search(line)
        if found is None:
            continue
        if found["start"]:
            lives.append([])
            continue
        command = LoggedCommand(
            found["name"], int(found["epoch"]), int(found["sequence"]), found["outcome"], found["request_id"]
        )
        lives[-1].append(command)
    return lives
