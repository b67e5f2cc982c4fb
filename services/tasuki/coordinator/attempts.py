"""Names of a request's changeovers in the journal, when it was tried more than once."""

from __future__ import annotations

from collections.abc import Iterator

from tasuki.coordinator.journal import Journal
from tasuki.coordinator.records import ChangeoverRecord


def next_attempt_id(journal: Journal, request_id: str) -> str:
    """Returns `request_id`, with a number appended if the journal has it from an earlier try."""
    return list(_names(journal, request_id))[-1]


def last_attempt(journal: Journal, request_id: str) -> ChangeoverRecord | None:
    """Last try of a request; None if it was never tried."""
    tried = list(_names(journal, request_id))[:-1]
    return journal.find(tried[-1]) if tried else None


def _names(journal: Journal, request_id: str) -> Iterator[str]:
    """Yields the names that the journal has, then the next one."""
    number, name = 1, request_id
    while journal.find(name) is not None:
        yield name
        number += 1
        name = f"{request_id}~{number}"
    yield name
