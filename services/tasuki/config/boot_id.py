"""Identity of one start of a node, so that a client does not carry on with a restarted node unawares."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

from tasuki.config.lock import NODE_LOCK, holder, lock_path
from tasuki.config.paths import instance_path


@dataclass(frozen=True, slots=True)
class Instance:
    """One start of a node. Both fields are empty if the services were started individually."""

    id: str = ""
    lock_path: str = ""


def begin_instance(state_dir: Path) -> None:
    """Creates the id of a starting node. Processes that restart within the node find the same one."""
    instance_path(state_dir).write_text(uuid.uuid4().hex)


def read_instance(state_dir: Path) -> Instance:
    """Reads the id of the node running in the folder. Ignores what a killed node left behind."""
    path = instance_path(state_dir)
    if not path.exists() or holder(state_dir, name=NODE_LOCK) is None:
        return Instance()
    return Instance(path.read_text(), str(lock_path(state_dir.absolute(), name=NODE_LOCK)))
