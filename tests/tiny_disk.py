"""Disks that are really full or read-only: a small tmpfs if the tests may mount one, else a limit on file size."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


class TinyDisk:
    """A folder whose disk `fill` leaves full until `free`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self) -> None:
        """Fills the disk to the last byte."""
        with (self.folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        (self.folder / "filler").unlink()

    def make_read_only(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(self.folder)], check=True)


class LimitedFiles(TinyDisk):
    """A stand-in without a mount: no file of this process can grow beyond the folder's largest file."""

    def fill(self) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        largest = max((file.stat().st_size for file in self.folder.iterdir() if file.is_file()), default=0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, self._limits[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)


@contextmanager
def tmpfs(folder: Path, *, num_kib: int) -> Iterator[TinyDisk]:
    """Mounts a tmpfs; skips the test, visibly, if mounting is not permitted."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_kib}k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs to mount a tmpfs: {mounted.stderr.strip()} (uid {os.getuid()})")
    try:
        yield TinyDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def limited_files(folder: Path) -> Iterator[TinyDisk]:
    folder.mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield LimitedFiles(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
