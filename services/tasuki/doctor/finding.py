"""Result of one check of `tasuki doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tasuki.config.lock import NODE_LOCK, holder
from tasuki.config.schema import NodeConfig
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import NotInstalled, TasukiError
from tasuki.wire.extras import install_extras


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


def checked(name: str, found: str, check: Callable[[], object], *, key: str) -> Finding:
    """Runs a check of the node's own start. key: to change if its error names none."""
    try:
        with named_if_denied(Path(found)):
            check()
    except NotInstalled as error:
        return fail(name, f"{error.reason}: {error.message}", install_extras(error.metadata["extras"]))
    except TasukiError as error:
        return fail(name, f"{error.reason}: {error.message}", f"change {error.metadata.get('field', key)}")
    return ok(name, found)


def is_running(config: NodeConfig) -> bool:
    """Whether the node is up. False for a state folder that the user may not enter, which another finding reports."""
    try:
        return holder(config.state_dir, name=NODE_LOCK) is not None
    except PermissionError:
        return False
