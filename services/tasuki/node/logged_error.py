"""Finds the cause of a service's death in its log."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tasuki.wire.regular_file import open_regular

_OURS = re.compile(r"^tasuki(?:\.\w+)?: (?:error )?([A-Z_]+): (.*)$", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
_CRASH = "Fatal Python error: "
_NUM_LINES = 12
_LOG_BYTES = 16_000_000


@dataclass(frozen=True, slots=True)
class LoggedError:
    """`reason` is one of tasuki.wire.errors if the service ended with one, else empty."""

    text: str
    reason: str = ""


def read_log(path: Path) -> str:
    """The last 16 MB of a log; empty if it is missing or cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            return file.read(_LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""


def find_error(log: str) -> LoggedError:
    """Returns our own error line; else the end of the first traceback, which later ones mostly repeat; else the stack of a native crash;
    else the last lines."""
    ours = _OURS.search(log)
    if ours:
        return LoggedError(ours[2], reason=ours[1])
    lines = [line for line in log.splitlines() if line.strip()]
    start = next((number for number, line in enumerate(lines) if _TRACEBACK in line), None)
    if start is None:
        crash = next((number for number, line in enumerate(lines) if line.startswith(_CRASH)), None)
        return LoggedError("\n".join(lines[-_NUM_LINES:] if crash is None else lines[crash : crash + _NUM_LINES]))
    margin = len(lines[start]) - len(lines[start].partition("Traceback")[2]) - len("Traceback")
    end = start + 1
    while end < len(lines) and lines[end][margin : margin + 1] in (" ", ""):
        end += 1
    return LoggedError("\n".join(lines[start : end + 1][-_NUM_LINES:]))
