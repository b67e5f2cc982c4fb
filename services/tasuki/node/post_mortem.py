"""Why the node died during a command."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from tasuki.config.lock import NODE_LOCK, holder
from tasuki.config.paths import log_path
from tasuki.config.schema import NodeConfig
from tasuki.node.exit_report import describe_exit, read_exit_report
from tasuki.node.logged_error import find_error, read_log
from tasuki.wire.errors import NodeDown, ServiceFailed, TasukiError, from_reason

_STOP_TIMEOUT_S = 10.0
_LOOK_EVERY_S = 0.1


def why_it_ended(config: NodeConfig) -> TasukiError:
    """Error for a node that has ended: the last words of the service that ended first, or who stopped the node."""
    state_dir = config.state_dir
    ending = read_exit_report(state_dir)
    first = ending.get("first")
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
