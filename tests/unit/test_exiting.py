"""Processes that count as exiting, by what the kernel says of them in /proc/PID/stat."""

from __future__ import annotations

import pytest

from tasuki.node.processes import is_exiting

_EXITING, _KILL_PENDING = 0x400004, 1 << 8


def _fields(state: str, *, flags: int = 0x400000, num_threads: int = 1, pending: int = 0) -> list[str]:
    fields = [state, *["0"] * 49]
    fields[6], fields[17], fields[28] = str(flags), str(num_threads), str(pending)
    return fields


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([], False),
        (_fields("S"), False),
        (_fields("D"), False),
        (_fields("T", pending=1 << 14), False),
        (_fields("D", flags=_EXITING), True),
        (_fields("R", flags=_EXITING, num_threads=8), True),
        (_fields("D", pending=_KILL_PENDING), True),
        (_fields("Z", flags=_EXITING, num_threads=2), True),
        (_fields("Z", flags=_EXITING), False),
        (_fields("X", flags=_EXITING, num_threads=0), False),
    ],
    ids=[
        "gone",
        "sleeps",
        "in a driver",
        "stopped and told to end",
        "exits",
        "threads",
        "killed in a driver",
        "last",
        "zombie",
        "dead",
    ],
)
def test_a_process_is_exiting_until_it_is_a_zombie_without_threads(
    fields: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasuki.node.processes._stat", lambda pid: fields)
    assert is_exiting(1) == expected
