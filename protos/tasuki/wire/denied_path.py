"""Paths that this process's user has no permission for."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasuki.wire.errors import PathPermissionDenied


def denied(path: Path, *, key: str = "") -> PathPermissionDenied:
    """The error for `path`, with the user and the file or folder to change. key: the setting or field that names the path."""
    prefix, user, cause = f"{key}: " if key else "", _user(), _cause(path)
    text = f"{prefix}{path}: permission denied for user {user}; change the mode or owner of {cause}, or run as another user"
    return PathPermissionDenied(text, path=path, user=user)


@contextmanager
def named_if_denied(path: Path, *, key: str = "") -> Iterator[None]:
    """Converts a PermissionError in the block to PathPermissionDenied for its file, or else for `path`."""
    try:
        yield
    except PermissionError as error:
        raise denied(Path(os.fsdecode(error.filename or path)), key=key) from error


def _user() -> str:
    uid = os.geteuid()
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:  # as for any uid of a container
        return f"uid {uid}"


def _cause(path: Path) -> Path:
    """The first folder above `path` that cannot be entered; else `path`, or the folder in which it is to be created."""
    path = path.absolute()
    for folder in reversed(path.parents):
        if not os.access(folder, os.X_OK, effective_ids=True):
            return folder
    return path if os.path.lexists(path) else path.parent
