"""What one check of `tasuki doctor` found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """A node runs, with a loss that `advice` tells."""
    FAIL = "fail"
    """A node does not start, or does not run."""


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    """Of the check."""
    verdict: Verdict
    found: str
    advice: str = ""
    """What to do; empty where all is well."""


def ok(name: str, found: str) -> Finding:
    return Finding(name, Verdict.OK, found)


def warn(name: str, found: str, advice: str) -> Finding:
    return Finding(name, Verdict.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Finding:
    return Finding(name, Verdict.FAIL, found, advice)
