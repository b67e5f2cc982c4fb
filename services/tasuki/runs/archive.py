"""The run archive: copies of the node's logs and journal for an audit, since the node's folder may serve another run next."""

import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tasuki.client.durable import write_durably
from tasuki.config import paths
from tasuki.config.choices import plan_path
from tasuki.coordinator.journal_file import open_journal
from tasuki.node.exit_report import KEPT_LOGS, rotated_paths
from tasuki.wire.regular_file import read_path

_PROCESSES = ("coordinator", "trainer", "rollout", "supervisor")
NODE_FILE = "state_dir"


@contextmanager
def archived(state_dir: Path, output_dir: Path) -> Iterator[None]:
    """Copies the node's logs and journal when the block ends. Files that cannot be copied are reported, not raised.

    Until then, or if this process is killed, `archive_folder` of the output folder is the node's.
    """
    node_file = output_dir / NODE_FILE
    if output_dir.resolve() != state_dir.resolve():
        output_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(node_file, f"{state_dir.resolve()}\n")
    try:
        yield
    finally:
        try:
            if output_dir.resolve() != state_dir.resolve():
                _copy_all(state_dir, output_dir)
            node_file.unlink(missing_ok=True)
        except (OSError, sqlite3.Error) as error:
            sys.stderr.write(f"tasuki: some files for an audit could not be copied to {output_dir}: {error}\n")


def archive_folder(folder: Path) -> Path:
    """Folder with the archive of the run in `folder`: the node's until the run has a copy, then `folder` itself.

    Raises OSError if the file that names the node cannot be read.
    """
    try:
        state_dir = read_path(folder / NODE_FILE)
        return state_dir if paths.journal_path(state_dir).is_file() else folder
    except FileNotFoundError:
        return folder


def _copy_all(state_dir: Path, output_dir: Path) -> None:
    """Copies the journal last, so that it contains every command that the services logged."""
    for process in _PROCESSES:
        target = paths.log_path(output_dir, process)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        source = paths.log_path(state_dir, process)
        pairs = zip(rotated_paths(source, keep=KEPT_LOGS), rotated_paths(target, keep=KEPT_LOGS), strict=True)
        for there, here in ((source, target), *pairs):
            _copy(there, here)
    _copy(paths.training_log_path(state_dir), paths.training_log_path(output_dir))
    _copy(paths.memory_record_path(state_dir), paths.memory_record_path(output_dir))
    _copy(paths.config_path(state_dir), paths.archived_config_path(output_dir))
    _copy(plan_path(state_dir), plan_path(paths.archived_config_path(output_dir).parent))
    if paths.fleet_journal_path(state_dir).is_file():
        _copy_journal(paths.fleet_journal_path(state_dir), paths.fleet_journal_path(output_dir))
    else:
        paths.fleet_journal_path(output_dir).unlink(missing_ok=True)
    _copy_journal(paths.journal_path(state_dir), paths.journal_path(output_dir))


def _copy(source: Path, target: Path) -> None:
    """Copies a file. If there is none, removes the target, which belongs to an earlier run."""
    target.unlink(missing_ok=True)
    if source.exists():
        _touch(target)
        shutil.copyfile(source, target)


def _touch(path: Path) -> None:
    """Creates a file for this user alone, as in the node's folder, whatever the umask: logs may hold prompts and completions."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _copy_journal(source: Path, target: Path) -> None:
    """Copies the journal consistently, even while it is written."""
    target.unlink(missing_ok=True)
    _touch(target)
    with open_journal(source) as journal, closing(sqlite3.connect(target)) as copy:
        journal.backup(copy)
