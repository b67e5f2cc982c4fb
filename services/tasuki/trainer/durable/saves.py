"""Checkpoints that the nodes of a fleet save together: each writes its own aside, and all get their names once all are written."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from tasuki.wire.errors import InvalidArgument, PathExists, PathNotFound

FACTS_FILE = "checkpoint.json"
_SAVE_ID = re.compile(r"[A-Za-z0-9-]{1,64}")


def check_save_id(save_id: str) -> None:
    """It becomes part of a name. Raises InvalidArgument."""
    if not _SAVE_ID.fullmatch(save_id):
        raise InvalidArgument("save_id", f"{save_id!a} is none; give 1 to 64 letters, digits and -")


def partial_path(path: Path, save_id: str) -> Path:
    """Where a checkpoint is while it is written."""
    return path.with_name(f".{path.name}.partial-{save_id}")


def written_path(path: Path, save_id: str) -> Path:
    """Where it is from then on until it is published."""
    return path.with_name(f".{path.name}.written-{save_id}")


def clear_other_saves(path: Path, save_id: str) -> None:
    """Removes what earlier saves to `path` have left beside it."""
    mine = (partial_path(path, save_id), written_path(path, save_id))
    for kind in ("partial", "written"):
        for left in path.parent.glob(f".{path.name}.{kind}*"):
            if left not in mine:
                shutil.rmtree(left, ignore_errors=True)


def publish(path: Path, save_id: str) -> None:
    """Gives what was written its name. Idempotent; where nodes share the folder, the first of them does it.

    Raises PathExists when something else is at `path`, PathNotFound when nothing was written, InvalidArgument when it cannot be renamed.
    """
    try:
        written_path(path, save_id).rename(path)
    except OSError as error:
        if _saved_as(path) == save_id:
            return
        if path.exists():
            raise PathExists(f"{path} came to be in the meantime", path=path) from error
        if isinstance(error, FileNotFoundError):
            raise PathNotFound(f"{path} was not written by the save {save_id}", path=path) from error
        raise InvalidArgument(
            "path", f"{path} cannot be written: {error.strerror}; name a folder that can be written"
        ) from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def can_be_published(path: Path, save_id: str) -> bool:
    return written_path(path, save_id).is_dir() or _saved_as(path) == save_id


def drop(path: Path, save_id: str) -> None:
    """Removes what was written and is not published. Idempotent."""
    for left in (partial_path(path, save_id), written_path(path, save_id)):
        shutil.rmtree(left, ignore_errors=True)


def _saved_as(path: Path) -> str | None:
    """The save that a checkpoint comes from; None when it is of none, or not there."""
    try:
        return json.loads((path / FACTS_FILE).read_text()).get("save_id")
    except (OSError, ValueError, AttributeError):
        return None
