"""Reads the commands in a service's log. The gate writes one line for each that was executed or refused; the audit reads them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tasuki.rpc.logs import LINES_LOST
from tasuki.wire.line_reader import MAX_LINE_BYTES, LineReader
from tasuki.wire.regular_file import open_regular

# Only the first match in a line: text of a caller may follow it, and remains of a progress bar may precede it.
_PREFIX = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ service=\S+ logger=\S+ ")
_LINE = re.compile(
    rf"event=(?:(?P<start>serving) service=|(?P<lost>{LINES_LOST})|command name=(?P<name>\S+) epoch=(?P<epoch>\d{{1,19}})"
    r" sequence=(?P<sequence>\d{1,19}) outcome=(?P<outcome>\S+) seconds=\S+"
    r"(?: boot_id=(?P<boot_id>\S*) version=(?P<version>\d{1,19}|-))? request_id=(?P<request_id>.+))"
)


@dataclass(frozen=True, slots=True)
class LoggedCommand:
    """outcome: "OK" or the reason of the error. request_id: as Python's ascii() writes it.

    boot_id: of the life that executed it. policy_version: the version that it published or received.
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
        """Whether it is numbered in the coordinator's sequence."""
        return self.sequence > 0


@dataclass(slots=True)
class LoggedLife:
    """One life of a service, as far as its log reaches."""

    commands: list[LoggedCommand] = field(default_factory=list)
    has_beginning: bool = False
    lacks_lines: bool = False
    """Whether lines were lost, as on a full disk."""


def read_command_log(path: Path) -> list[LoggedLife]:
    """Lives in a log; empty if there is no log or no service in it. Raises OSError if it cannot be read."""
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
            version = found["version"] or "-"
            command = LoggedCommand(
                name=found["name"],
                epoch=int(found["epoch"]),
                sequence=int(found["sequence"]),
                outcome=found["outcome"],
                request_id=found["request_id"],
                boot_id=found["boot_id"] or "",
                policy_version=None if version == "-" else int(version),
            )
            lives[-1].commands.append(command)
    return [life for life in lives if life.commands or life.has_beginning or life.lacks_lines]


def _lines(path: Path) -> Iterator[str]:
    try:
        with open_regular(path) as file:
            reader = LineReader()
            for line in reader.lines(file):
                yield from line.decode(errors="replace").splitlines()
            file.seek(reader.offset)  # the last line of a killed service may be incomplete
            yield from file.read(MAX_LINE_BYTES).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return
