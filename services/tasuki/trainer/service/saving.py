"""SaveCheckpoint: at once on a single node, in parts in a fleet."""

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

from tasuki.trainer.durable import saves
from tasuki.trainer.durable.training_log import TrainingLog
from tasuki.trainer.ranks import TrainerRanks
from tasuki.trainer.service.state import TrainerState
from tasuki.v1.ranks_pb2 import TrainerRankCommand, TrainingRecord
from tasuki.v1.trainer_pb2 import (
    LoadCheckpointRequest,
    SaveCheckpointRequest,
    SaveCheckpointResponse,
    SavePart,
)
from tasuki.wire.errors import DiskFull, InvalidArgument, VersionOrder


@dataclass(frozen=True, slots=True)
class _Written:
    save_id: str
    path: str
    answer: SaveCheckpointResponse
    log_position: int


class Saving:
    """Saves of one trainer. Its methods require the turn."""

    def __init__(self, ranks: TrainerRanks, log: TrainingLog, *, state: TrainerState, record_path: Path) -> None:
        """record_path: file that tells a restarted trainer what it had written."""
        self._ranks, self._log, self._state, self._record_path = ranks, log, state, record_path
        self._written: _Written | None = None

    async def save(self, request: SaveCheckpointRequest, record: TrainingRecord) -> SaveCheckpointResponse:
        """record: the command, for the log. Raises the errors of SaveCheckpoint."""
        if request.part not in SavePart.values():
            raise InvalidArgument("part", f"{request.part} is unknown")
        if request.part != SavePart.SAVE_PART_UNSPECIFIED:
            saves.check_save_id(request.save_id)
        match request.part:
            case SavePart.SAVE_PART_WRITE:
                return await self._write(request, record)
            case SavePart.SAVE_PART_PUBLISH:
                return await self._publish(request, record)
            case SavePart.SAVE_PART_DROP:
                self._written = None
                await asyncio.to_thread(saves.delete, Path(request.path), request.save_id)
                return SaveCheckpointResponse()
        self._log.check_not_behind()
        saved = await self._at_once(request)
        await self._log.saved(_of_checkpoint(record, request, saved))
        return saved

    async def _at_once(self, request: SaveCheckpointRequest) -> SaveCheckpointResponse:
        """Names the save after the request: a repeated one finds what it had published before the trainer died."""
        started, path, version = time.perf_counter(), Path(request.path), self._state.policy_version
        save_id = saves.save_id_of(request.command.request_id, await asyncio.to_thread(self._log.digest))
        if await asyncio.to_thread(saves.saved_as, path) == save_id:
            num_bytes = await asyncio.to_thread(saves.folder_bytes, path)
            return SaveCheckpointResponse(policy_version=version, bytes=num_bytes, seconds=time.perf_counter() - started)
        await asyncio.to_thread(saves.delete, path, save_id)
        written = SaveCheckpointRequest(path=request.path, part=SavePart.SAVE_PART_WRITE, save_id=save_id)
        saved = await self._by_ranks(written)
        await asyncio.to_thread(saves.publish, path, save_id)
        return saved

    async def _write(self, request: SaveCheckpointRequest, record: TrainingRecord) -> SaveCheckpointResponse:
        self._log.check_not_behind()
        saved = await self._by_ranks(request)
        await asyncio.to_thread(_keep, self._record_path, _of_checkpoint(record, request, saved))
        self._written = _Written(request.save_id, request.path, saved, self._log.position)
        return saved

    async def _publish(self, request: SaveCheckpointRequest, record: TrainingRecord) -> SaveCheckpointResponse:
        written = self._written
        if written is None or (written.save_id, written.path) != (request.save_id, request.path):
            raise InvalidArgument("save_id", f"{request.path} was not written by the save {request.save_id}")
        if written.log_position != self._log.position:
            text = f"the trainer has trained since it wrote {request.path}; save again"
            raise VersionOrder(text, have=written.answer.policy_version, want=written.answer.policy_version)
        await asyncio.to_thread(saves.publish, Path(request.path), request.save_id)
        await self._log.saved(_of_checkpoint(record, request, written.answer))
        self._written = None
        return written.answer

    async def _by_ranks(self, request: SaveCheckpointRequest) -> SaveCheckpointResponse:
        answers = await self._ranks.call(TrainerRankCommand(save_checkpoint=request))
        return answers[0].save_checkpoint


def read_written(record_path: Path) -> TrainingRecord | None:
    """Record that an earlier life of the trainer wrote as its part of a save; None if nothing can be published."""
    try:
        record = TrainingRecord.FromString(record_path.read_bytes())
    except FileNotFoundError:
        return None
    path = Path(record.checkpoint.path)
    return record if saves.can_be_published(path, record.save_id) else None


def _of_checkpoint(record: TrainingRecord, request: SaveCheckpointRequest, saved: SaveCheckpointResponse) -> TrainingRecord:
    made = TrainingRecord()
    made.CopyFrom(record)
    made.checkpoint.CopyFrom(LoadCheckpointRequest(path=request.path))
    made.save_answer.CopyFrom(saved)
    made.save_id = request.save_id
    return made


def _keep(path: Path, record: TrainingRecord) -> None:
    """Raises DiskFull."""
    aside = path.with_suffix(".part")
    try:
        aside.touch(mode=0o600)
        with aside.open("wb") as file:
            file.write(record.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise DiskFull(f"{path} cannot be written: {error.strerror}", path=path) from error
