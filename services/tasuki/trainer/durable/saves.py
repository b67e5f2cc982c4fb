"""Checkpoints that are written aside and then published; those of a fleet once all nodes have written theirs."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from tasuki.wire.denied_path import denied
from tasuki.wire.errors import InvalidArgument, PathExists, PathNotFound
from tasuki.wire.regular_file import read_regular

FACTS_FILE = "checkpoint.json"
MAX_FACTS_BYTES = 1 << 20
"""Far more than any has; reading a sparse file of a caller's folder would otherwise take all memory."""
_SAVE_ID = re.compile(r"[A-Za-z0-9-]{1,64}")


def check_save_id(save_id: str) -> None:
    """Raises InvalidArgument unless the id can be part of a file name."""
    if not _SAVE_ID.fullmatch(save_id):
        raise InvalidArgument("save_id", f"{save_id!a} is invalid; give 1 to 64 letters, digits and -")


def save_id_of(request_id: str, *trained: str) -> str:
    """The same for a repeated request. trained: digest of what is saved."""
    return hashlib.sha256(" ".join((request_id, *trained)).encode()).hexdigest()[:32]


def partial_path(path: Path, save_id: str) -> Path:
    """Path of a checkpoint while it is being written."""
    return path.with_name(f".{path.name}.partial-{save_id}")


def written_path(path: Path, save_id: str) -> Path:
    """Path of a written checkpoint until it is published."""
    return path.with_name(f".{path.name}.written-{save_id}")


def clear_other_saves(path: Path, save_id: str) -> None:
    """Removes what earlier saves to `path` left beside it."""
    mine = (partial_path(path, save_id), written_path(path, save_id))
    of_path = re.compile(rf"\.{re.escape(path.name)}\.(partial|written)(-{_SAVE_ID.pattern})?")
    for left in path.parent.iterdir():
        if of_path.fullmatch(left.name) and left not in mine:
            shutil.rmtree(left, ignore_errors=True)


def publish(path: Path, save_id: str) -> None:
    """Publishes what was written. Idempotent; if nodes share the folder, the first one does it.

    Raises PathExists if `path` is something else, PathNotFound if nothing was written, PathPermissionDenied, InvalidArgument if the
    rename fails.
    """
    try:
        written_path(path, save_id).rename(path)
    except OSError as error:
        if saved_as(path) == save_id:
            return
        if path.exists():
            raise PathExists(f"{path} was created in the meantime", path=path) from error
        if isinstance(error, FileNotFoundError):
            raise PathNotFound(f"{path} was not written by the save {save_id}", path=path) from error
        if isinstance(error, PermissionError):
            raise denied(path) from error
        raise InvalidArgument("path", f"{path} cannot be written: {error.strerror}; name a writable folder") from error
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Makes a file or folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def can_be_published(path: Path, save_id: str) -> bool:
    return written_path(path, save_id).is_dir() or saved_as(path) == save_id


def delete(path: Path, save_id: str) -> None:
    """Deletes what was written but not published. Idempotent."""
    for left in (partial_path(path, save_id), written_path(path, save_id)):
        shutil.rmtree(left, ignore_errors=True)


def folder_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def saved_as(path: Path) -> str | None:
    """The save that wrote a checkpoint; None without one."""
    try:
        return json.loads(read_regular(path / FACTS_FILE, max_bytes=MAX_FACTS_BYTES)).get("save_id")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
