"""Tells whether the configuration's node is up."""

from __future__ import annotations

from tasuki.config.lock import NODE_LOCK, holder
from tasuki.config.schema import NodeConfig


def is_running(config: NodeConfig) -> bool:
    """Whether the node is up. False for a state folder that the user may not enter, which another finding reports."""
    try:
        return holder(config.state_dir, name=NODE_LOCK) is not None
    except PermissionError:
        return False
