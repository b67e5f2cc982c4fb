"""Log of the commands since the last checkpoint, durable before they are acknowledged. A restarted trainer replays it.

A file of frames, each a header and a TrainingRecord. A frame is written before its command runs, so that on a full disk a command is
refused before it changes anything. It is marked as done in place before the command is answered. A truncated or unmarked last frame
belongs to a command that was never acknowledged, and is dropped. Any other unreadable part is damage, and is reported.
"""

import asyncio
import hashlib
import logging
import os
import struct
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

from google.protobuf.message import DecodeError

from tasuki.rpc.failpoints import Failpoints
from tasuki.trainer.durable.saves import fsync
from tasuki.v1.ranks_pb2 import TrainingRecord
from tasuki.v1.types_pb2 import Role
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import DiskFull, GradientsNotFinite, InvalidArgument, PathNotFound
from tasuki.wire.regular_file import open_regular

_log = logging.getLogger("tasuki.trainer")
_HEADER = struct.Struct("<IIB")
"""Size of the record, its CRC-32, and 1 once the command is done."""
_READ_BYTES = 1 << 20
_DONE_OFFSET = _HEADER.size - 1
_Item = TypeVar("_Item")
Pending: TypeAlias = dict["Role.ValueType", list[_Item]]
"""By role, in order."""


class TrainingLog:
    """The log of one trainer."""

    def __init__(self, path: Path, *, failpoints: Failpoints) -> None:
        """Raises InvalidArgument if the log is damaged, DiskFull if it cannot be written."""
        self._path, self._failpoints = path, failpoints
        self.is_behind = False
        """Whether a command was done that the log lacks."""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DiskFull(f"{path} cannot be written: {error.strerror}", path=path) from error
        self._end = 0
        """Offset of the next frame."""
        self._pending: Pending[tuple[int, int]] = {}
        """Offset and size of the frames whose gradients await their role's optimizer step."""
        try:
            for record in self.records():
                self._advance(record)
        except InvalidArgument as error:
            text = f"{path} is damaged at byte {error.metadata['byte']}; restart the node and load a checkpoint"
            raise InvalidArgument("state_dir", text) from error
        os.ftruncate(self._fd, self._end)

    def close(self) -> None:
        os.close(self._fd)

    @property
    def position(self) -> int:
        """Increases with every completed command."""
        return self._end

    def digest(self) -> str:
        """Tells apart what was trained since the checkpoint; the same once a restarted trainer has replayed it."""
        digest, at = hashlib.sha256(), 0
        while at < self._end:
            header = os.pread(self._fd, _HEADER.size, at)
            digest.update(header)
            at += _HEADER.size + _HEADER.unpack(header)[0]
        return digest.hexdigest()

    def keep(self, num_records: int) -> None:
        """Drops all but the oldest `num_records`."""
        kept = list(self.records())[:num_records]
        self._end, self._pending = 0, {}
        for record in kept:
            self._advance(record)
        os.ftruncate(self._fd, self._end)
        os.fsync(self._fd)

    def records(self) -> Iterator[TrainingRecord]:
        """Completed commands, oldest first. The first may be the checkpoint that the others build on."""
        return _records(self._fd, self._path)

    @asynccontextmanager
    async def command(self, record: TrainingRecord) -> AsyncIterator[None]:
        """Logs the command that the block carries out. It counts if the block succeeds, or fails with GRADIENTS_NOT_FINITE.

        Raises DiskFull before entering the block if there is no space, or once the log has fallen behind.
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
        """Drops what the checkpoint contains: everything except gradients that await their optimizer step.

        Without space it keeps everything, which leads to the same weights, and warns. Call it after `check_not_behind`.
        """
        assert not self.is_behind
        pending = {role: [os.pread(self._fd, size, at) for at, size in frames] for role, frames in self._pending.items()}
        try:
            await asyncio.to_thread(self._replace, checkpoint, pending)
        except DiskFull as error:
            path = checkpoint.checkpoint.path
            _log.warning("event=log_not_shortened checkpoint=%a cause=%a keep=the_checkpoint_before", path, error.message)

    async def loaded(self, checkpoint: TrainingRecord) -> None:
        """Drops everything: training continues from the checkpoint, without gradients.

        Raises DiskFull. The log then no longer matches the weights, so nothing is trained until a load succeeds or the trainer restarts.
        """
        self.is_behind = True
        await asyncio.to_thread(self._replace, checkpoint, {})
        self.is_behind = False

    def check_not_behind(self) -> None:
        """Raises DiskFull if a command was done that the log lacks."""
        if self.is_behind:
            raise DiskFull(f"{self._path} lacks a completed command; restart the trainer", path=self._path)

    def _begin(self, record: TrainingRecord) -> None:
        self.check_not_behind()
        try:
            self._failpoints.hit("log.begin")
            _write(self._fd, _frame(record, is_done=False), at=self._end)
            os.fdatasync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            raise DiskFull(f"{self._path} cannot be written: {error.strerror}; nothing was trained", path=self._path) from error

    def _commit(self, record: TrainingRecord) -> None:
        try:
            self._failpoints.hit("log.commit")
            os.pwrite(self._fd, b"\1", self._end + _DONE_OFFSET)
            os.fdatasync(self._fd)
        except OSError as error:
            self.is_behind = True
            text = f"{self._path} cannot be written: {error.strerror}; the trainer is ahead of it, restart it"
            raise DiskFull(text, path=self._path) from error
        self._advance(record)

    def _advance(self, record: TrainingRecord) -> None:
        size = _HEADER.size + record.ByteSize()
        follow(self._pending, record, (self._end, size))
        self._end += size

    def _replace(self, checkpoint: TrainingRecord, pending: Pending[bytes]) -> None:
        """pending: frames. Those of a role keep their order; roles do not depend on each other."""
        content = _frame(checkpoint, is_done=True)
        kept: Pending[tuple[int, int]] = {}
        for role, frames in pending.items():
            for frame in frames:
                kept.setdefault(role, []).append((len(content), len(frame)))
                content += frame
        aside = self._path.with_suffix(".part")
        try:
            fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                self._failpoints.hit("log.replace")
                _write(fd, content, at=0)
                os.fsync(fd)
                aside.rename(self._path)
            except OSError:
                os.close(fd)
                aside.unlink()  # a leftover would keep a full disk full
                raise
            os.close(self._fd)
            self._fd, self._pending, self._end = fd, kept, len(content)
            fsync(self._path.parent)
        except OSError as error:
            raise DiskFull(f"{aside} cannot be written: {error.strerror}", path=aside) from error


def read_training_log(path: Path) -> list[TrainingRecord]:
    """Reads the commands of a log, without their content, even while a trainer writes it.

    Raises PathNotFound, PathPermissionDenied, InvalidArgument if it is damaged, and OSError if it cannot be read.
    """
    try:
        with named_if_denied(path), open_regular(path) as file:
            return [_without_content(record) for record in _records(file.fileno(), path)]
    except FileNotFoundError as error:
        raise PathNotFound(f"there is no training log at {path}", path=path) from error


def read_base(path: Path) -> Path | None:
    """The checkpoint that a log builds on, even while a trainer writes it; None for the initial weights. Raises as read_training_log."""
    try:
        with named_if_denied(path), open_regular(path) as file:
            first = next(_records(file.fileno(), path), None)
    except FileNotFoundError:
        return None
    return None if first is None or not first.HasField("checkpoint") else Path(first.checkpoint.path).resolve()


def _without_content(record: TrainingRecord) -> TrainingRecord:
    bare = TrainingRecord(request_id=record.request_id)
    command = record.WhichOneof("command")
    if command is not None:
        getattr(bare, command).SetInParent()
    if command in ("forward_backward", "optim_step", "discard_gradients"):
        getattr(bare, command).role = getattr(record, command).role
    return bare


def _records(fd: int, path: Path) -> Iterator[TrainingRecord]:
    at, size = 0, os.fstat(fd).st_size  # read the size first: a trainer may be writing
    while len(header := os.pread(fd, _HEADER.size, at)) == _HEADER.size:
        num_bytes, checksum, is_done = _HEADER.unpack(header)
        num_left = max(0, size - at - _HEADER.size)
        if not is_done and (num_bytes >= num_left or _is_zero(fd, at + _HEADER.size)):
            return
        content = os.pread(fd, min(num_bytes, num_left), at + _HEADER.size)
        if is_done != 1 or len(content) != num_bytes or zlib.crc32(content) != checksum:
            raise InvalidArgument("training.log", f"{path} is damaged at byte {at}", byte=at)
        try:
            record = TrainingRecord.FromString(content)
        except DecodeError as error:
            raise InvalidArgument("training.log", f"{path} is damaged at byte {at}", byte=at) from error
        yield record
        at += _HEADER.size + num_bytes
        size = os.fstat(fd).st_size


def _is_zero(fd: int, at: int) -> bool:
    while content := os.pread(fd, _READ_BYTES, at):
        if content.strip(b"\0"):
            return False
        at += len(content)
    return True


def _frame(record: TrainingRecord, *, is_done: bool) -> bytes:
    content = record.SerializeToString()
    return _HEADER.pack(len(content), zlib.crc32(content), is_done) + content


def _write(fd: int, content: bytes, *, at: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def first_repetition(records: Sequence[TrainingRecord]) -> str:
    """Describes the first record that cannot follow those before it; empty if there is none."""
    seen: set[str] = set()
    pending: Pending[int] = {}
    for number, record in enumerate(records):
        command = record.WhichOneof("command") or "nothing"
        name = f"record {number} ({command}, request id {record.request_id!a})"
        if record.request_id and record.request_id in seen:
            return f"one record of each command, found {name} again"
        if command == "checkpoint" and number:
            return f"a checkpoint as the first record only, found {name}"
        if command == "optim_step" and record.optim_step.role not in pending:
            return f"gradients before {name}"
        seen.add(record.request_id)
        follow(pending, record, number)
    return ""


def follow(pending: Pending[_Item], record: TrainingRecord, item: _Item) -> None:
    """Updates what awaits its role's optimizer step. item: stands for the record."""
    match record.WhichOneof("command"):
        case "forward_backward":
            pending.setdefault(record.forward_backward.role, []).append(item)
        case "optim_step":
            pending.pop(record.optim_step.role, None)
        case "discard_gradients":
            pending.pop(record.discard_gradients.role, None)
        case _:
            pass  # begins without gradients, and leaves none
