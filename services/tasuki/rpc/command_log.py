"""The commands in a service's log: the gate writes a line for each that was carried out or refused, and an audit reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tasuki.rpc.logs import LINES_LOST
from tasuki.wire.line_reader import MAX_LINE_BYTES, LineReader
from tasuki.wire.regular_file import open_regular

# The first one of a line: behind it there may be a caller's text, and before it what a library's progress bar has left.
_PREFIX = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ service=\S+ logger=\S+ ")
_LINE = re.compile(
    rf"event=(?:(?P<start>serving) service=|(?P<lost>{LINES_LOST})|command name=(?P<name>\S+) epoch=(?P<epoch>\d{{1,19}})"
    r" sequence=(?P<sequence>\d{1,19}) outcome=(?P<outcome>\S+) seconds=\S+"
    r"(?: boot_id=(?P<boot_id>\S*) version=(?P<version>\d{1,19}|-))? request_id=(?P<request_id>.+))"
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
    """The lives in a log; none when there is no log, or nothing of a service in it. Raises OSError if it cannot be read."""
    lives = [LoggedLife()]
    for line in _lines(path):
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


def _lines(path: Path) -> Iterator[str]:
    try:
        with open_regular(path) as file:
            reader = LineReader()
            for line in reader.lines(file):
                yield from line.decode(errors="replace").splitlines()
            file.seek(reader.offset)  # of a service that was killed, the last line may lack its end
            yield from file.read(MAX_LINE_BYTES).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return


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
