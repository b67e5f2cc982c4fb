"""Where a node's sockets are: both ends work it out from the state folder, so no one needs to be told."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from pathlib import Path

from tasuki.wire.errors import NodeRunning

# sockaddr_un holds 108 bytes; the longest name below the folder takes 40.
_MAX_SOCKET_DIR = 68
_PROBE_TIMEOUT_S = 1.0


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


def remove_dead_socket(path: Path) -> None:
    """Makes way where a server that was killed has left its socket.

    Raises NodeRunning when one answers there, or cannot be asked, and when something else is there than a socket.
    """
    try:
        is_socket = stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        if not path.is_symlink():  # whatever else keeps us from it, bind() says
            return
        is_socket = False
    if not is_socket:
        raise NodeRunning(f"{path} is in the way: it is no socket; remove it", address=path)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise NodeRunning(f"{path} is there and is no socket of a dead server: {error}", address=path) from error
    raise NodeRunning(f"another process serves {path}", address=path)
