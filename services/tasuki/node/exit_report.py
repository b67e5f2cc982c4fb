"""How and why the last node in a state folder ended: the supervisor's report, the last words in the services' logs, and earlier logs."""

import json
import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc

from tasuki.config.lock import NODE_LOCK, holder
from tasuki.config.paths import REQUESTED_BY, exit_path, log_path
from tasuki.config.schema import NodeConfig
from tasuki.wire.errors import NodeDown, ServiceFailed, TasukiError, from_reason
from tasuki.wire.regular_file import open_regular, read_regular

_MAX_BYTES = 1 << 20
_KEYS = {"reason": str, "time": str, "first": str | None, "restarts": dict, "services": dict}
KILLED_FOR_MEMORY = "the kernel has killed a process for lack of memory"
"""Part of the reason of a node that ended so: its services' logs cannot know."""
_OURS = re.compile(r"^tasuki(?:\.\w+)?: (?:error )?([A-Z_]+): (.*)$", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
_CRASH = "Fatal Python error: "
_NUM_LINES, _LINE = 12, 200
_LOG_BYTES = 16_000_000
_STOP_TIMEOUT_S = 10.0
_START = "tasuki up CONFIG"
_LOOK_EVERY_S = 0.1
_NONE: Mapping[str, int] = MappingProxyType({})
_log = logging.getLogger("tasuki.node")


def read_exit_report(state_dir: Path) -> dict[str, Any]:
    """Reads the report; empty if no node has ended there since the last start, or if it cannot be read."""
    try:
        report = json.loads(read_regular(exit_path(state_dir), max_bytes=_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return report if isinstance(report, dict) and all(isinstance(report.get(key), kind) for key, kind in _KEYS.items()) else {}


def node_down(state_dir: Path, *, start: str = _START) -> NodeDown:
    """Error of a call that needs a node; includes the cause if the last one ended unexpectedly. start: the command to suggest."""
    report = read_exit_report(state_dir)
    cause = ""
    if report and not is_requested(report):
        start += " (up --resume goes on where it ended)" if start == _START else ""
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
    exit_codes: Mapping[str, int] = _NONE,
    restarts: Mapping[str, int] = _NONE,
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
        partial.touch(mode=0o600)
        partial.write_text(json.dumps(report, indent=2) + "\n")
        partial.rename(exit_path(state_dir))
    except OSError as error:  # a full disk must not prevent the rest of the shutdown
        _log.error("event=no_exit_report reason=%s error=%s", reason, error)
        with suppress(OSError):
            partial.unlink(missing_ok=True)


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


def log_ends(state_dir: Path, service: str) -> str:
    """ "; LOG ends: LINE", with the last line of a service's log; empty if it says nothing."""
    path = log_path(state_dir, service)
    lines = [line for line in read_log(path).splitlines() if line.strip()]
    return f"; {path} ends: {lines[-1][:_LINE]}" if lines else ""


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


def why_it_ended(config: NodeConfig) -> TasukiError:
    """Error for a node that has ended: the last words of the service that ended first, or who stopped the node."""
    state_dir = config.state_dir
    ending = read_exit_report(state_dir)
    first = ending.get("first")
    if first and KILLED_FOR_MEMORY in ending["reason"]:
        log = log_path(state_dir, first)
        return ServiceFailed(f"{ending['reason']} ({describe_exit(ending, first)}); see {log}", service=first, log=log)
    if first:
        return _words_of(first, f"{ending['reason']} ({describe_exit(ending, first)})", log_path(state_dir, first))
    log = log_path(state_dir, "supervisor")
    if ending:
        if find_error(read_log(log)).reason:
            return _words_of("supervisor", ending["reason"], log)
        return NodeDown(f"the node on {state_dir} has ended: {ending['reason']}", state_dir=state_dir)
    # The supervisor had no time to write a report, or did not get that far.
    if "event=started" in read_log(log):
        return NodeDown(
            f"the node on {state_dir} has ended without a report: its supervisor and guard were killed; see {log}", log=log
        )
    return _words_of("supervisor", "the supervisor ended before it started anything", log)


def has_ended(config: NodeConfig, *, within_s: float = _STOP_TIMEOUT_S) -> bool:
    """Waits for a node that may be ending; returns False if it keeps running."""
    deadline = time.monotonic() + within_s
    while holder(config.state_dir, name=NODE_LOCK) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True


@contextmanager
def explained(config: NodeConfig) -> Iterator[None]:
    """If the node dies during the block, raises the reason instead of the broken call's error."""
    try:
        yield
    except TasukiError as error:
        # A dying node fails calls in various ways; a replaced node is already reported as such.
        if error.code is not grpc.StatusCode.UNAVAILABLE or "instance_id" in error.metadata or not has_ended(config):
            raise
        raise why_it_ended(config) from None


def _words_of(service: str, how: str, log: Path) -> TasukiError:
    words = find_error(read_log(log))
    if words.reason:
        return from_reason(words.reason, f"{service}: {words.text}", {"service": service, "log": str(log)})
    said = f"; {log} says:\n{words.text}" if words.text else f"; {log} says nothing"
    return ServiceFailed(how + said, service=service, log=log)


KEPT_LOGS = 5
"""Number of earlier logs kept for each process."""
LOG_BYTES = 100_000_000
"""Size at which the log of a running service is rotated."""


def rotate(path: Path, *, keep: int) -> None:
    """Renames "x.log" to "x.log.old", that to "x.log.old.1" and so on; deletes the oldest beyond `keep`."""
    if not path.exists():
        return
    names = [path, *rotated_paths(path, keep=keep)]
    for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
        if newer.exists():
            newer.replace(older)


def rotate_open(path: Path, *, keep: int, limit_bytes: int = LOG_BYTES) -> None:
    """Rotates a log of `limit_bytes` or more whose writers have it open for appending, and keep it.

    It is copied, then emptied: lines written in between are lost, and all of them if the disk is full.
    """
    if not path.exists() or path.stat().st_size < limit_bytes:
        return
    copy = path.with_name(f"{path.name}.copy")
    with suppress(OSError):
        shutil.copy(path, copy)
        rotate(path, keep=keep)
        path.with_name(f"{path.name}.old").rename(path)
        copy.rename(path.with_name(f"{path.name}.old"))
    copy.unlink(missing_ok=True)
    os.truncate(path, 0)


def rotated_paths(path: Path, *, keep: int) -> list[Path]:
    """Paths of earlier files, whether they exist or not, newest first."""
    newest = path.with_name(f"{path.name}.old")
    return [newest, *(newest.with_name(f"{newest.name}.{number}") for number in range(1, keep))]
