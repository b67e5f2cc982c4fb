"""Checkpoint files: torch.distributed.checkpoint writes and reads the tensors, with a JSON index instead of torch's pickle.

A pickle can run arbitrary code in the process that reads it; tensors are read with `weights_only`, which cannot.
The index has a checksum of every part of a tensor, since torch does not detect damage.
"""

from __future__ import annotations

import io
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError, model_validator
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tasuki.trainer.durable.regular_file import open_regular, read_regular
from tasuki.wire.errors import InvalidArgument

_INDEX_FILE = "tensors.json"
_CHUNK_BYTES = 16 << 20
_Sizes = tuple[NonNegativeInt, ...]


def _known_dtype(name: str) -> str:
    if not isinstance(vars(torch).get(name), torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    return name


class _Part(BaseModel):
    """A block of a tensor: its offsets and sizes, and the bytes of a file that hold it."""

    model_config = ConfigDict(extra="forbid")
    offsets: _Sizes
    sizes: _Sizes
    file: Annotated[str, Field(pattern=r"^\w+\.distcp$")]
    start: NonNegativeInt
    num_bytes: NonNegativeInt
    crc32: Annotated[int, Field(ge=0, lt=2**32)]
    """CRC-32 of those bytes."""


class _Tensor(BaseModel):
    model_config = ConfigDict(extra="forbid")
    dtype: Annotated[str, AfterValidator(_known_dtype)]
    size: _Sizes
    parts: list[_Part]

    @model_validator(mode="after")
    def _parts_are_the_whole(self) -> _Tensor:
        """Torch would silently leave anything that no part covers uninitialized."""
        if sum(math.prod(part.sizes) for part in self.parts) != math.prod(self.size):
            raise ValueError("its parts are not the whole tensor")
        return self


_Index = TypeAdapter(dict[str, _Tensor])


@dataclass
class _StoredPart(_StorageInfo):
    """Location and checksum of a part written by torch. Sent to the first rank with the rest of torch's results."""

    crc32: int = 0


class DamagedFile(ValueError):
    """A tensor's bytes differ from what was written. Has only a message, since it passes between ranks like torch's exceptions."""


class TensorWriter(FileSystemWriter):
    """Writes tensors with an index. Reports disk errors as they are."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            results = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            # After a failed write, torch.save fails again when it closes its archive. The disk's error is the earlier one.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        summed: Future[list[WriteResult]] = Future()
        summed.set_result([replace(result, storage_data=self._sum_up(result.storage_data)) for result in results])
        return summed

    def _sum_up(self, stored: _StorageInfo) -> _StoredPart:
        with open_regular(Path(self.path) / stored.relative_path) as file:
            crc32 = _checksum(file, stored, progressed=lambda: None)
        return _StoredPart(stored.relative_path, stored.offset, stored.length, crc32=crc32)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        index: dict[str, _Tensor] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), "a checkpoint contains only tensors"
            parts = [_part(chunk, stored[MetadataIndex(name, chunk.offsets)]) for chunk in tensor.chunks]
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            index[name] = _Tensor(dtype=dtype, size=tuple(tensor.size), parts=parts)
        (Path(self.path) / _INDEX_FILE).write_bytes(_Index.dump_json(index))


class TensorReader(FileSystemReader):
    """Reads what TensorWriter wrote, from regular files with correct checksums."""

    def __init__(self, folder: Path, *, progressed: Callable[[], None]) -> None:
        """progressed: called for every 16 MiB. Raises InvalidArgument if the index is missing or damaged."""
        super().__init__(folder)
        self.fs, self._progressed = _RegularFiles(), progressed
        file = folder / _INDEX_FILE
        try:
            self._metadata = _metadata(_Index.validate_json(read_regular(file)))
        except OSError as error:
            raise InvalidArgument("path", f"{file} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            raise damaged(file, error) from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises DamagedFile before anything is read of a part with a wrong checksum."""
        parts: Mapping[MetadataIndex, _StoredPart] = self.storage_data
        wanted = {(part.relative_path, part.offset): part for part in (parts[item.storage_index] for item in plan.items)}
        for _, part in sorted(wanted.items()):
            with open_regular(Path(self.path) / part.relative_path) as file:
                if _checksum(file, part, progressed=self._progressed) != part.crc32:
                    raise DamagedFile(f"{part.relative_path} is damaged: its checksum differs from the one in {_INDEX_FILE}")
        return super().read_data(plan, planner)


class _RegularFiles(FileSystem):
    """Torch's file system for reading; refuses a FIFO in place of a file instead of blocking."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "rb", "nothing is written while a checkpoint is read"
        with open_regular(Path(path)) as stream:
            yield cast(io.IOBase, stream)


def _checksum(file: BinaryIO, part: _StorageInfo, *, progressed: Callable[[], None]) -> int:
    """CRC-32 of a part's bytes, up to the end of the file."""
    file.seek(part.offset)
    left, crc32 = part.length, 0
    while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
        crc32 = zlib.crc32(chunk, crc32)
        left -= len(chunk)
        progressed()
    return crc32


def damaged(file: Path, error: ValidationError) -> InvalidArgument:
    """Error for an invalid file of a checkpoint."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return InvalidArgument("path", f"{file} is damaged: {f'{place}: ' if place else ''}{first['msg']}")


def _part(chunk: ChunkStorageMetadata, stored: _StoredPart) -> _Part:
    return _Part(
        offsets=tuple(chunk.offsets),
        sizes=tuple(chunk.sizes),
        file=stored.relative_path,
        start=stored.offset,
        num_bytes=stored.length,
        crc32=stored.crc32,
    )


def _metadata(index: dict[str, _Tensor]) -> Metadata:
    """Converts to the metadata that torch's reader expects."""
    tensors: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StoredPart] = {}
    for name, tensor in index.items():
        chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in tensor.parts]
        tensors[name] = TensorStorageMetadata(TensorProperties(getattr(torch, tensor.dtype)), torch.Size(tensor.size), chunks)
        for part in tensor.parts:
            stored[MetadataIndex(name, part.offsets)] = _StoredPart(part.file, part.start, part.num_bytes, crc32=part.crc32)
    return Metadata(tensors, storage_data=stored)
