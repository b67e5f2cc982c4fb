"""What has been trained since the last checkpoint, on disk before it is acknowledged: a trainer that comes back does it again.

A file of frames, each a header and a TrainingRecord. A frame is written before its command is carried out, so that a full disk
refuses a command that has changed nothing, and marked as done in place before the command is answered. A torn or unmarked last frame is
of a command that nobody was told to be done; it is dropped.
"""

from __future__ import annotations

import asyncio
import os
import struct
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from tasuki.rpc.failpoints import Failpoints
from tasuki.v1.ranks_pb2 import TrainingRecord
from tasuki.wire.errors import DiskFull, GradientsNotFinite

_HEADER = struct.Struct("<IIB")
"""Bytes of the record, their CRC-32, and 1 when the command was carried out."""
_DONE_OFFSET = _HEADER.size - 1


class TrainingLog:
    """The log of one trainer."""

    def __init__(self, path: Path, *, failpoints: Failpoints) -> None:
        self._path, self._failpoints = path, failpoints
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._end = self._pending_start = 0
        """Where the next frame goes, and where those begin whose gradients wait for their optimizer step."""
        for record in self.records():
            self._advance(record)
        os.ftruncate(self._fd, self._end)

    def close(self) -> None:
        os.close(self._fd)

    def records(self) -> Iterator[TrainingRecord]:
        """What was done, oldest first; the first may be the checkpoint that the others build on."""
        at = 0
        while len(header := os.pread(self._fd, _HEADER.size, at)) == _HEADER.size:
            num_bytes, checksum, is_done = _HEADER.unpack(header)
            content = os.pread(self._fd, num_bytes, at + _HEADER.size)
            if not is_done or len(content) < num_bytes or zlib.crc32(content) != checksum:
                return
            yield TrainingRecord.FromString(content)
            at += _HEADER.size + num_bytes

    @asynccontextmanager
    async def command(self, record: TrainingRecord) -> AsyncIterator[None]:
        """Carries a command out in its block: it is in the log when the block has ended well, or with GRADIENTS_NOT_FINITE.

        Raises DiskFull, with the block not entered, when there is no room for it.
        """
        await asyncio.to_thread(self._begin, record)
        try:
            yield
        except GradientsNotFinite:
            await asyncio.to_thread(self._commit, record)
            raise
        except BaseException:
            os.ftruncate(self._fd, self._end)
            raise
        await asyncio.to_thread(self._commit, record)

    async def saved(self, checkpoint: TrainingRecord) -> None:
        """Forgets what is in the checkpoint: all but the gradients that wait for their optimizer step."""
        pending = os.pread(self._fd, self._end - self._pending_start, self._pending_start)
        await asyncio.to_thread(self._replace, checkpoint, pending)

    async def loaded(self, checkpoint: TrainingRecord) -> None:
        """Forgets everything: training goes on from the checkpoint, without gradients."""
        await asyncio.to_thread(self._replace, checkpoint, b"")

    def _begin(self, record: TrainingRecord) -> None:
        try:
            self._failpoints.hit("log.begin")
            _write(self._fd, _frame(record, is_done=False), at=self._end)
            os.fdatasync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            raise DiskFull(f"{self._path} cannot be written: {error.strerror}; nothing was trained", path=self._path) from error

    def _commit(self, record: TrainingRecord) -> None:
        self._failpoints.hit("log.commit")
        os.pwrite(self._fd, b"\1", self._end + _DONE_OFFSET)
        os.fdatasync(self._fd)
        self._advance(record)

    def _advance(self, record: TrainingRecord) -> None:
        """The record, which stands at the end, was done."""
        self._end += _HEADER.size + record.ByteSize()
        if record.WhichOneof("command") != "forward_backward":
            self._pending_start = self._end

    def _replace(self, checkpoint: TrainingRecord, pending: bytes) -> None:
        first = _frame(checkpoint, is_done=True)
        aside = self._path.with_suffix(".part")
        fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self._failpoints.hit("log.replace")
            _write(fd, first + pending, at=0)
            os.fsync(fd)
            aside.rename(self._path)
            _fsync_folder(self._path.parent)
        except OSError as error:
            os.close(fd)
            raise DiskFull(f"{aside} cannot be written: {error.strerror}", path=aside) from error
        os.close(self._fd)
        self._fd, self._pending_start, self._end = fd, len(first), len(first) + len(pending)


def _frame(record: TrainingRecord, *, is_done: bool) -> bytes:
    content = record.SerializeToString()
    return _HEADER.pack(len(content), zlib.crc32(content), is_done) + content


def _write(fd: int, content: bytes, *, at: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def _fsync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
