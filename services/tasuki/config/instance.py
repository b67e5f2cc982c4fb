"""Which start of a node this is: a client that outlives one must not go on with the next as if nothing had happened."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

from tasuki.config.lock import NODE_LOCK, holder, lock_path
from tasuki.config.places import instance_path


@dataclass(frozen=True, slots=True)
class Instance:
    """One start of a node. Both are empty when its services were started one by one, without a node around them."""

    id: str = ""
    lock_path: str = ""


def begin_instance(state_dir: Path) -> None:
    """Names the node that is being started; every process of it that is restarted finds the same name."""
    instance_path(state_dir).write_text(uuid.uuid4().hex)


def read_instance(state_dir: Path) -> Instance:
    """The node that runs on the folder. What a node that was killed has left there is none."""
    path = instance_path(state_dir)
    if not path.exists() or holder(state_dir, name=NODE_LOCK) is None:
        return Instance()
    return Instance(path.read_text(), str(lock_path(state_dir.absolute(), name=NODE_LOCK)))
