"""Where a node keeps its files and sockets: one function for each, so that every process agrees."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from tasuki.wire.errors import InvalidArgument

# sockaddr_un holds 108 bytes; the longest name below the folder takes 40.
_MAX_SOCKET_DIR = 68


def socket_dir(state_dir: Path) -> Path:
    """Private (0700) folder of a node's sockets, made when missing: below state_dir, or, when that path is too long for a unix
    socket, in the system's temporary folder under a name derived from it.

    Raises InvalidArgument when the folder belongs to another user or is a link.
    """
    place = state_dir.absolute() / "run"
    if len(os.fsencode(place)) > _MAX_SOCKET_DIR:
        digest = hashlib.sha256(os.fsencode(state_dir.absolute())).hexdigest()[:16]
        place = Path(tempfile.gettempdir()) / f"tasuki-{os.getuid()}-{digest}"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = place.lstat()
    if place.is_symlink() or status.st_uid != os.getuid():
        raise InvalidArgument("state_dir", f"socket folder {place} is a link or belongs to another user")
    place.chmod(0o700)
    return place


def grpc_target(state_dir: Path, *, service: str, listen: str) -> str:
    """gRPC target of a service: its unix socket, or the TCP address that `listen` gives."""
    return f"unix:{socket_dir(state_dir) / service}.sock" if listen == "unix" else listen


def log_path(state_dir: Path, service: str) -> Path:
    return state_dir / "logs" / f"{service}.log"


def journal_path(state_dir: Path) -> Path:
    return state_dir / "journal.sqlite"
