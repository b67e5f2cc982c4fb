"""Where a node's sockets are: both ends work it out from the state folder, so no one needs to be told."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

# sockaddr_un holds 108 bytes; the longest name below the folder takes 40.
_MAX_SOCKET_DIR = 68


def socket_folder(state_dir: Path) -> Path:
    """Folder of a node's sockets, whether it exists or not: below state_dir, or, when that path is too long for a unix socket, in
    /tmp under a name derived from it. It does not follow TMPDIR, which clients and services may have set differently.
    """
    place = state_dir.absolute() / "run"
    if len(os.fsencode(place)) <= _MAX_SOCKET_DIR:
        return place
    digest = hashlib.sha256(os.fsencode(state_dir.absolute())).hexdigest()[:16]
    return Path("/tmp") / f"tasuki-{os.getuid()}-{digest}"  # noqa: S108 - config.places makes it private and checks its owner


def unix_target(state_dir: Path, *, service: str) -> str:
    """gRPC target of a service that listens on its unix socket."""
    return f"unix:{socket_folder(state_dir) / service}.sock"
