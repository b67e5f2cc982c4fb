"""The newest lines of a node's logs, of all its processes in their order."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import Any

from tasuki.config.paths import log_path
from tasuki.wire.regular_file import open_regular

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
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
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
