"""Result of one check of `tasuki doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """A node runs, with the drawback named in `advice`."""
    FAIL = "fail"
    """A node would not start or run."""


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    """Name of the check."""
    verdict: Verdict
    found: str
    advice: str = ""
    """Action to take; empty if all is well."""


def ok(name: str, found: str) -> Finding:
    return Finding(name, Verdict.OK, found)


def warn(name: str, found: str, advice: str) -> Finding:
    return Finding(name, Verdict.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Finding:
    return Finding(name, Verdict.FAIL, found, advice)
