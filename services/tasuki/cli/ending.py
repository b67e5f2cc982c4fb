"""How the last node on a state folder ended, as its supervisor left word of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tasuki.config.places import exit_path, log_path
from tasuki.wire.errors import NodeDown


def read_ending(state_dir: Path) -> dict[str, Any]:
    """What `supervisor.write_exit` wrote; empty when no node has ended there since the last start."""
    path = exit_path(state_dir)
    return json.loads(path.read_text()) if path.exists() else {}


def no_node(state_dir: Path) -> NodeDown:
    """The error of a call that needs a node, with the cause when the last one did not end by order."""
    ending = read_ending(state_dir)
    first = ending.get("first")
    cause = ""
    if first:
        how = ", ".join(f"{name} {value}" for name, value in ending["services"][first].items())
        cause = f": the last one ended at {ending['time']} because {first} ended by itself ({how}), see {log_path(state_dir, first)}"
    elif "killed" in ending.get("reason", ""):
        cause = f": the last one ended at {ending['time']} because {ending['reason']}"
    return NodeDown(f"no node runs on {state_dir}{cause}; start one with: tasuki up CONFIG", state_dir=state_dir)
