"""The newest lines of a node's logs, of all its processes in their order, and restarts of its services, from the supervisor's logs."""

import re
from collections import Counter, deque
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from tasuki.config.paths import log_path
from tasuki.node.exit_report import KEPT_LOGS, rotated_paths
from tasuki.wire.regular_file import open_regular, unreadable

PROCESSES = ("supervisor", "coordinator", "trainer", "rollout")
_TAIL_BYTES, _MAX_LINES, _MAX_CHARS = 400_000, 1_000, 2_000
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ([A-Z]+) (.*)")


def read_logs(folder: Path, *, only_warnings: bool) -> dict[str, Any]:
    """The newest thousand lines, oldest first. Lines without a time, such as a traceback's, have that of the line before, and its level.

    only_warnings: leaves out DEBUG and INFO. problems: why a log cannot be read.
    """
    lines: list[dict[str, str]] = []
    problems: list[str] = []
    for process in PROCESSES:
        path = log_path(folder, process)
        try:
            found = _tail(path, process)
        except OSError as error:
            problems += filter(None, [unreadable(path, error)])
            continue
        lines += deque((line for line in found if not (only_warnings and line["level"] in ("DEBUG", "INFO", ""))), _MAX_LINES)
    return {"lines": sorted(lines, key=lambda line: line["time"])[-_MAX_LINES:], "problems": problems}


def _tail(path: Path, process: str) -> list[dict[str, str]]:
    """Raises OSError."""
    with open_regular(path) as file:
        start = max(0, file.seek(0, 2) - _TAIL_BYTES)
        file.seek(start)
        texts = file.read(_TAIL_BYTES).decode(errors="replace").split("\n")[bool(start) :]
    time, level, lines = "", "", []
    for text in filter(None, texts):
        if found := _LINE.match(text):
            time, level, text = found.groups()
        lines.append({"time": time, "level": level, "process": process, "text": text[:_MAX_CHARS]})
    return lines


_LOG_BYTES = 2_000_000
_MAX_RESTARTS = 200
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) .*? event=(\w+) (.*)")
_FIELD = re.compile(r"\b(\w+)=(.*?)(?= \w+=|$)")

_Stamp = tuple[int, int, int]
"""Inode, size and time of a log."""


class RestartLogs:
    """Rereads a log when it changes. Services also begin at each start of the node, which is no restart."""

    def __init__(self, log: Path) -> None:
        self._paths = [log, *rotated_paths(log, keep=KEPT_LOGS)]
        self.problem = ""
        self._starts: dict[_Stamp, list[dict[str, Any]]] = {}
        """Restarts of each start of the node; the newest of both first."""

    def advance(self) -> bool:
        """Returns whether there was anything new."""
        starts: dict[_Stamp, list[dict[str, Any]]] = {}
        problem = ""
        for path in self._paths:
            try:
                status = path.stat()
                stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
                starts[stamp] = self._starts[stamp] if stamp in self._starts else _restarts(path)[::-1]
            except OSError as error:  # there may be fewer starts, or they are rotated just now
                problem = problem or unreadable(path, error)
        is_new = list(starts) != list(self._starts)
        self._starts, self.problem = starts, problem
        return is_new

    def read(self) -> dict[str, Any]:
        """Restarts with their causes, newest first; their number by service, also of the node's last start alone.

        counts_now: None if the logs have one start only.
        """
        starts = list(self._starts.values())
        found = [restart for start in starts for restart in start]
        return {
            "restarts": found[:_MAX_RESTARTS],
            "num_starts": len(starts),
            "counts": Counter(restart["service"] for restart in found),
            "counts_now": Counter(restart["service"] for restart in starts[0]) if len(starts) > 1 else None,
        }

    def coordinator_restarts_now(self) -> int | None:
        """Number of the coordinator's restarts since the node's last start; None without a log."""
        newest = next(iter(self._starts.values()), None)
        return None if newest is None else sum(restart["service"] == "coordinator" for restart in newest)


def _restarts(log: Path) -> list[dict[str, Any]]:
    """Raises OSError."""
    with open_regular(log) as file:
        file.seek(max(0, file.seek(0, 2) - _LOG_BYTES))
        text = file.read(_LOG_BYTES).decode(errors="replace")
    causes: dict[str, str] = {}
    found: list[dict[str, Any]] = []
    for match in filter(None, map(_LOG_LINE.match, text.splitlines())):
        event, fields = match[3], dict(_FIELD.findall(match[4]))
        service = fields.get("service") or fields.get("process", "").rstrip("0123456789").replace("scheduler", "rollout")
        if event == "ended":
            code = fields.get("exit_code", "")
            causes[service] = f"killed by signal {code[1:]}" if code.startswith("-") else f"ended with exit code {code}"
        elif event in ("stalled", "lost", "restart_asked"):
            causes[service] = fields.get("cause", event)
        elif event == "restart":
            cause = causes.pop(service, "")
            with suppress(ValueError, OverflowError):  # no such time
                moment = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(match[2]) / 1000  # noqa: DTZ007
                found.append({"time": moment, "service": service, "number": fields.get("number", ""), "cause": cause})
    return found
