"""Atomic folders: written aside, fsynced, renamed. Collective calls of all ranks; the first rank does the work."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from tasuki.trainer.durable.saves import clear_other_saves, fsync, partial_path, written_path
from tasuki.v1.ranks_pb2 import RankError
from tasuki.wire.denied_path import denied
from tasuki.wire.errors import NO_ROOM, DiskFull, InternalError, InvalidArgument, PathExists, TasukiError, from_reason

_log = logging.getLogger("tasuki.trainer")


def start_aside(path: Path, *, mode: int = 0o700) -> Path:
    """Creates an empty folder beside `path`, to be renamed to it later, and those above. Removes what a failed attempt left there.

    Raises PathExists if `path` exists, InvalidArgument if the folder cannot be created.
    """
    aside = path.with_name(f".{path.name}.partial")

    def make() -> None:
        if path.exists():
            raise PathExists(f"{path} already exists; name a new folder", path=path)
        if aside.exists():
            shutil.rmtree(aside)
        path.parent.mkdir(mode=mode, parents=True, exist_ok=True)
        aside.mkdir(mode=mode)

    on_first_rank(make, path=path)
    return aside


def claim_aside(path: Path, save_id: str) -> Path | None:
    """Like start_aside, for a save of several nodes; returns None if another node that shares the folder writes it."""
    aside = partial_path(path, save_id)
    is_mine = True

    def make() -> None:
        nonlocal is_mine
        if path.exists():
            raise PathExists(f"{path} already exists; name a new folder", path=path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        clear_other_saves(path, save_id)
        try:
            aside.mkdir(mode=0o700)
        except FileExistsError:
            is_mine = False
        else:
            if written_path(path, save_id).exists():  # the other node has already finished
                aside.rmdir()
                is_mine = False

    on_first_rank(make, path=path)
    return aside if _broadcast(b"mine" if is_mine else b"theirs") == b"mine" else None


def rename_into_place(aside: Path, path: Path, *, finish: Callable[[], None] = lambda: None) -> None:
    """Makes the folder durable, and renames it. finish: writes the last files, on rank 0."""

    def rename() -> None:
        try:
            finish()
            most = aside.stat().st_mode
            for file in aside.rglob("*"):
                file.chmod(file.stat().st_mode & most)  # others may read no file of a private folder, wherever it is copied
                fsync(file)
            fsync(aside)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)  # a leftover would keep a full disk full
            raise
        if path.exists():
            raise PathExists(f"{path} was created in the meantime", path=path)
        aside.rename(path)
        fsync(path.parent)

    on_first_rank(rename, path=path)


def delete_aside(aside: Path, *, path: Path) -> None:
    """Deletes what a failed attempt to write `path` left behind."""
    on_first_rank(lambda: shutil.rmtree(aside, ignore_errors=True), path=path)


def on_first_rank(action: Callable[[], None], *, path: Path) -> None:
    """Runs `action` on rank 0 while the others wait. If it fails, every rank raises the same error.

    Converts an OSError with cannot_write, and logs an unexpected exception and converts it to InternalError.
    """
    failure = b""
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as os_error:
            failure = _encoded(cannot_write(path, os_error))
        except TasukiError as error:
            failure = _encoded(error)
        except Exception as error:  # noqa: BLE001 - a boundary: whatever it is, the other ranks wait
            _log.error("event=first_rank_failed path=%a", str(path), exc_info=error)
            text = f"{path}: {type(error).__name__}: {error}"
            failure = _encoded(InternalError(text.encode(errors="backslashreplace").decode()))
    failure = _broadcast(failure)
    if failure:
        known = RankError.FromString(failure)
        raise from_reason(known.reason, known.message, dict(known.metadata))


def cannot_write(path: Path, error: OSError) -> TasukiError:
    """DiskFull without space, PathPermissionDenied, InvalidArgument if the caller's `path` cannot be written for another reason."""
    text = f"{path} cannot be written: {error.strerror or error}"
    if error.errno in NO_ROOM:
        return DiskFull(f"{text}; existing files are unchanged. Free space, or name a folder on another disk", path=path)
    if isinstance(error, PermissionError):
        return denied(path)
    return InvalidArgument("path", f"{text}; name a writable folder")


def _encoded(error: TasukiError) -> bytes:
    return RankError(reason=error.reason, message=error.message, metadata=error.metadata).SerializeToString()


def _broadcast(payload: bytes) -> bytes:
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    num_bytes = torch.tensor(len(payload), device=device)
    dist.broadcast(num_bytes, src=0)
    content = torch.zeros(int(num_bytes), dtype=torch.uint8, device=device)
    if dist.get_rank() == 0:
        content.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else content)
    if len(content):
        dist.broadcast(content, src=0)
    return bytes(content.tolist())
