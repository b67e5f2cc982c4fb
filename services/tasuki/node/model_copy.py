"""The node's copy of its model in shared memory, which lives as long as the node."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tasuki.config.paths import model_copy_dir
from tasuki.config.schema import NodeConfig
from tasuki.memory.host import host_memory
from tasuki.models.folder_files import bytes_to_copy, model_files


@contextmanager
def preloaded_model(config: NodeConfig, *, tell: Callable[[str], None]) -> Iterator[None]:
    """Copies the model from a network file system. Removes the copy if the block, or copying, ends with an exception.

    Replaces a copy that a killed node left; call it with the node's lock held. Services read `model.path` if the copy fails. Raises as
    model_files.
    """
    remove_model_copy(config.state_dir)
    place = model_copy_dir(config.state_dir)
    try:
        if needed := bytes_to_copy(config.model.path, host_bytes=host_memory().total_bytes):
            started = time.monotonic()
            try:
                _copy(config.model.path, place)
                tell(f"copied {needed} bytes of {config.model.path} to {place} in {time.monotonic() - started:.1f} s")
            except OSError as error:
                remove_model_copy(config.state_dir)
                tell(f"{config.model.path} is not copied to {place}: {error}")
        yield
    except BaseException:
        remove_model_copy(config.state_dir)
        raise


def remove_model_copy(state_dir: Path) -> None:
    """Removes the copy, also an unfinished one; call it once no service reads it."""
    place = model_copy_dir(state_dir)
    for folder in (place, _unfinished(place)):
        shutil.rmtree(folder, ignore_errors=True)


def _unfinished(place: Path) -> Path:
    return place.with_name(f"{place.name}.part")


def _copy(folder: Path, place: Path) -> None:
    """Copies the files that services read, following links. A service never sees an unfinished copy. Raises OSError, also if the folder
    exists, as another user's may."""
    _unfinished(place).mkdir(mode=0o700)
    for file in model_files(folder):
        shutil.copyfile(file, _unfinished(place) / file.name)
    _unfinished(place).rename(place)
