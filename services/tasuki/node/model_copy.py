"""The node's copy of its model in shared memory (`model.preload`), which lives as long as the node."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tasuki.config.paths import model_copy_dir
from tasuki.config.schema import NodeConfig
from tasuki.memory.host import host_memory
from tasuki.models.folder_files import model_files
from tasuki.wire.errors import NO_ROOM, InvalidArgument

_KEY = "model.preload"


@contextmanager
def preloaded_model(config: NodeConfig, *, tell: Callable[[str], None]) -> Iterator[None]:
    """Copies the model if the configuration asks for it. Removes the copy if the block, or copying, ends with an exception.

    Replaces a copy that a killed node left; call it with the node's lock held. Raises InvalidArgument without room for the copy or a
    private folder for it, and as model_files.
    """
    remove_model_copy(config.state_dir)
    try:
        if config.model.preload:
            started = time.monotonic()
            num_bytes = _copy(config.model.path, model_copy_dir(config.state_dir))
            seconds = time.monotonic() - started
            tell(f"model.preload: copied {num_bytes} bytes to {model_copy_dir(config.state_dir)} in {seconds:.1f} s")
        yield
    except BaseException:
        remove_model_copy(config.state_dir)
        raise


def remove_model_copy(state_dir: Path) -> None:
    """Removes the copy, also an unfinished one; call it once no service reads it."""
    for place in _copies(state_dir):
        shutil.rmtree(place, ignore_errors=True)


def copy_room_bytes(state_dir: Path, folder: Path) -> int:
    """Room in `folder` of shared memory for the node's copy. The copy of a killed node counts as room: a start removes it."""
    left = (file for place in _copies(state_dir) for file in place.glob("*"))
    return _free_bytes(folder) + sum(file.stat().st_size for file in left)


def _copies(state_dir: Path) -> tuple[Path, Path]:
    return model_copy_dir(state_dir), _unfinished(model_copy_dir(state_dir))


def _unfinished(place: Path) -> Path:
    return place.with_name(f"{place.name}.part")


def _copy(folder: Path, place: Path) -> int:
    """Copies the files that services read, following links, and returns their bytes. A service never sees an unfinished copy."""
    files = model_files(folder)
    needed = sum(file.stat().st_size for file in files)
    _check_room(needed, place.parent)
    try:
        _fill(_unfinished(place), files)
        _unfinished(place).rename(place)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise _no_room(needed, place.parent) from error
        raise InvalidArgument(_KEY, f"{folder} cannot be copied to {place}: {error}; remove the key") from error
    return needed


def _fill(place: Path, files: Sequence[Path]) -> None:
    """Raises FileExistsError if the folder exists, as another user's may."""
    place.mkdir(mode=0o700)
    for file in files:
        shutil.copyfile(file, place / file.name)


def _check_room(needed: int, folder: Path) -> None:
    if not folder.is_dir():
        raise InvalidArgument(_KEY, f"this machine has no {folder}; mount a tmpfs there, or remove the key")
    if needed > _free_bytes(folder):
        raise _no_room(needed, folder)


def _no_room(needed: int, folder: Path) -> InvalidArgument:
    free = _free_bytes(folder)
    text = (
        f"the model's files take {needed} bytes, and {folder} has room for {free}; enlarge it, free memory, or remove the key"
    )
    return InvalidArgument(_KEY, text, needed_bytes=needed, free_bytes=free)


def _free_bytes(folder: Path) -> int:
    """Room in shared memory: its own limit, and the machine's or container's free memory."""
    return min(shutil.disk_usage(folder).free, host_memory().available_bytes)
