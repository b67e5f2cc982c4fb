"""How the last node on a state folder ended, as its supervisor left word of it."""

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

from tasuki.config.places import exit_path, log_path
from tasuki.wire.errors import NodeDown

_log = logging.getLogger("tasuki.supervisor")
BY_ORDER = "asked by"
"""How the reason begins when somebody stopped the node."""


def read_ending(state_dir: Path) -> dict[str, Any]:
    """What `write_exit` wrote; empty when no node has ended there since the last start."""
    path = exit_path(state_dir)
    return json.loads(path.read_text()) if path.exists() else {}


def no_node(state_dir: Path) -> NodeDown:
    """The error of a call that needs a node, with the cause when the last one did not end by order."""
    ending = read_ending(state_dir)
    cause = ""
    if ending and not is_by_order(ending):
        cause = f": the last one ended at {ending['time']} because {ending['reason']}"
    if first := ending.get("first"):
        cause += f" ({how_it_ended(ending, first)}), see {log_path(state_dir, first)}"
    return NodeDown(f"no node runs on {state_dir}{cause}; start one with: tasuki up CONFIG", state_dir=state_dir)


def is_by_order(ending: Mapping[str, Any]) -> bool:
    """Whether somebody stopped the node, as opposed to what happens to it."""
    return str(ending.get("reason", "")).startswith(BY_ORDER)


def how_it_ended(ending: Mapping[str, Any], service: str) -> str:
    """E.g. "signal SIGKILL, started anew 5 times"; empty of a service that the node's last word does not name."""
    how = ending.get("services", {}).get(service, {})
    words = [f"{name.replace('_', ' ')} {value}" for name, value in how.items() if name != "stopped"]
    if times := ending.get("restarts", {}).get(service):
        words.append(f"started anew {times} time{'s' if times > 1 else ''}")
    return ", ".join(words)


def write_exit(
    state_dir: Path,
    *,
    reason: str,
    first: str | None,
    exit_codes: Mapping[str, int] = MappingProxyType({}),
    restarts: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Leaves word of how the node ended. `first`: the service that ended by itself; exit codes as in `reap`. restarts: how
    often each service was started anew.

    Of a service that ended when it was told to, an exit code says nothing: torchrun's is then 1.
    """
    told = {
        "reason": reason,
        "first": first,
        "restarts": dict(restarts),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "services": {
            name: {"signal": signal.Signals(-code).name}
            if code < 0
            else {"exit_code": code}
            if name == first
            else {"stopped": True}
            for name, code in exit_codes.items()
        },
    }
    partial = exit_path(state_dir).with_suffix(".part")
    try:
        partial.write_text(json.dumps(told, indent=2) + "\n")
        partial.rename(exit_path(state_dir))
    except OSError as error:  # a full disk must not keep what comes after from being done
        _log.error("event=no_exit_report reason=%s error=%s", reason, error)
        with suppress(OSError):
            partial.unlink(missing_ok=True)
