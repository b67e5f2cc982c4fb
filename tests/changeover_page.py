"""The path from Acquire to the unmap, as docs/changeover.md lists it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SERVICES = {"OFFLOAD": "trainer", "PAUSE_KV": "rollout"}


def section() -> str:
    """Returns the page's section on the path."""
    (found,) = re.findall(
        r"^## From Acquire to the unmap$(.*?)^## ", (ROOT / "docs" / "changeover.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return found


def written_paths() -> dict[str, list[tuple[str, str]]]:
    """Returns file and function per stage, in the order of the table. A row that names a service counts for that service's stage only."""
    rows = re.findall(r"^\| [^|]*\| `([^`]+\.py)` \| ([^|]+) \| ([^|]+) \|$", section(), re.MULTILINE)
    return {
        stage: [
            (file, function)
            for file, functions, does in rows
            if not any(does.startswith(f"{other}: ") for other in _SERVICES.values() if other != service)
            for function in re.findall(r"`(\w+)`", functions)
        ]
        for stage, service in _SERVICES.items()
    }


def written_counts() -> dict[str, tuple[int, int]]:
    """Returns the number of files and functions per stage, from the sentence below the table."""
    (numbers,) = re.findall(
        r"^That is (\d+) files and (\d+) functions for OFFLOAD, (\d+) and (\d+) for PAUSE_KV", section(), re.MULTILINE
    )
    files, functions, *others = map(int, numbers)
    return {"OFFLOAD": (files, functions), "PAUSE_KV": (others[0], others[1])}
