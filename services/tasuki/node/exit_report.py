"""The supervisor's report of how the last node in a state folder ended."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tasuki.config.paths import REQUESTED_BY, exit_path, log_path
from tasuki.wire.errors import NodeDown
from tasuki.wire.regular_file import read_regular

_MAX_BYTES = 1 << 20
_KEYS = {"reason": str, "time": str, "first": str | None, "restarts": dict, "services": dict}
_log = logging.getLogger("tasuki.node")


def read_exit_report(state_dir: Path) -> dict[str, Any]:
    """Reads the report; empty if no node has ended there since the last start, or if it cannot be read."""
    try:
        report = json.loads(read_regular(exit_path(state_dir), max_bytes=_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return report if isinstance(report, dict) and all(isinstance(report.get(key), kind) for key, kind in _KEYS.items()) else {}


def node_down(state_dir: Path, *, start: str = "tasuki up CONFIG") -> NodeDown:
    """Error of a call that needs a node; includes the cause if the last one ended unexpectedly. start: the command to suggest."""
    report = read_exit_report(state_dir)
    cause = ""
    if report and not is_requested(report):
        cause = f": the last one ended at {report['time']} because {report['reason']}"
    if first := report.get("first"):
        cause += f" ({describe_exit(report, first)}), see {log_path(state_dir, first)}"
    return NodeDown(f"no node runs on {state_dir}{cause}; start one with: {start}", state_dir=state_dir)


def is_requested(report: Mapping[str, Any]) -> bool:
    """Whether someone stopped the node, rather than it failing."""
    return str(report.get("reason", "")).startswith(REQUESTED_BY)


def describe_exit(report: Mapping[str, Any], service: str) -> str:
    """E.g. "signal SIGKILL, restarted 5 times"; empty if the report does not name the service."""
    how = report.get("services", {}).get(service, {})
    words = [f"{name.replace('_', ' ')} {value}" for name, value in how.items() if name != "stopped"]
    if times := report.get("restarts", {}).get(service):
        words.append(f"restarted {times} time{'s' if times > 1 else ''}")
    return ", ".join(words)


def write_exit_report(
    state_dir: Path,
    *,
    reason: str,
    first: str | None,
    exit_codes: Mapping[str, int] = MappingProxyType({}),
    restarts: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Reports how the node ended. `first`: the service that ended unexpectedly; exit codes as in `reap`. restarts: number of restarts
    of each service.

    The exit code of a service that was told to end is ignored, and so is SIGTERM, which one that is still starting does not handle.
    """
    report = {
        "reason": reason,
        "first": first,
        "restarts": dict(restarts),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "services": {
            name: {"stopped": True}
            if name != first and (code >= 0 or code == -signal.SIGTERM)
            else {"signal": signal.Signals(-code).name}
            if code < 0
            else {"exit_code": code}
            for name, code in exit_codes.items()
        },
    }
    partial = exit_path(state_dir).with_suffix(".part")
    try:
        partial.write_text(json.dumps(report, indent=2) + "\n")
        partial.rename(exit_path(state_dir))
    except OSError as error:  # a full disk must not prevent the rest of the shutdown
        _log.error("event=no_exit_report reason=%s error=%s", reason, error)
        with suppress(OSError):
            partial.unlink(missing_ok=True)
