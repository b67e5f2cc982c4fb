"""One request, tried more than once: under which names the journal has its changeovers."""

from __future__ import annotations

from collections.abc import Iterator

from tasuki.coordinator.journal import Journal
from tasuki.coordinator.records import ChangeoverRecord


def next_attempt_id(journal: Journal, request_id: str) -> str:
    """`request_id`, or with a number behind it when the journal has it: the same request, tried again."""
    return list(_names(journal, request_id))[-1]


def last_attempt(journal: Journal, request_id: str) -> ChangeoverRecord | None:
    """What became of a request when it was tried for the last time; None when it never was."""
    tried = list(_names(journal, request_id))[:-1]
    return journal.find(tried[-1]) if tried else None


def _names(journal: Journal, request_id: str) -> Iterator[str]:
    """Those that the journal has, and the next one."""
    number, name = 1, request_id
    while journal.find(name) is not None:
        yield name
        number += 1
        name = f"{request_id}~{number}"
    yield name
