"""Checkpoint files: torch.distributed.checkpoint writes and reads the tensors, with a JSON index instead of torch's pickle.

A pickle can run arbitrary code in the process that reads it; tensors are read with `weights_only`, which cannot.
Torch does not detect damage: checkpoint.json has its own checksum and the index's, and the index that of every part of a tensor.
"""

import io
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
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

from tasuki.trainer.durable.saves import FACTS_FILE
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.regular_file import open_regular, read_regular

_INDEX_FILE = "tensors.json"
_CHUNK_BYTES = 16 << 20
_Size = Annotated[int, Field(ge=0, lt=2**63)]
_Sizes = Annotated[tuple[_Size, ...], Field(max_length=8)]


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
    start: _Size
    num_bytes: _Size
    crc32: Annotated[int, Field(ge=0, lt=2**32)]
    """CRC-32 of those bytes."""


class StoredTensor(BaseModel):
    """A tensor in the index."""

    model_config = ConfigDict(extra="forbid")
    dtype: Annotated[str, AfterValidator(_known_dtype)]
    size: _Sizes
    parts: list[_Part]

    @model_validator(mode="after")
    def _parts_are_the_whole(self) -> "StoredTensor":
        """Torch would silently leave anything that no part covers uninitialized."""
        if any(len(part.offsets) != len(self.size) or len(part.sizes) != len(self.size) for part in self.parts):
            raise ValueError("its parts have other dimensions")
        # Boxes cover each element of the whole exactly once if and only if their signed corners add up to those of the whole.
        corners = _corners((0,) * len(self.size), self.size)
        for part in self.parts:
            corners.subtract(_corners(part.offsets, part.sizes))
        if any(corners.values()):
            raise ValueError("its parts are not the whole tensor")
        return self


def _corners(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Counter[tuple[int, ...]]:
    """A box as the sum of its corners, each 1 or -1: the indicator function of the box is that sum of quadrants."""
    corners: Counter[tuple[int, ...]] = Counter()
    for ends in product((0, 1), repeat=len(sizes)):
        corner = tuple(offset + end * size for offset, end, size in zip(offsets, ends, sizes, strict=True))
        corners[corner] += (-1) ** sum(ends)
    return corners


_MAX_INDEX_BYTES = 1 << 30
"""About 100 bytes for each part of a tensor on a rank."""
_Index = TypeAdapter(dict[str, StoredTensor])


def index_checksum(folder: Path) -> int:
    """CRC-32 of the index that TensorWriter wrote."""
    return zlib.crc32(read_regular(folder / _INDEX_FILE))


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
        index: dict[str, StoredTensor] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), "a checkpoint contains only tensors"
            parts = [_part(chunk, stored[MetadataIndex(name, chunk.offsets)]) for chunk in tensor.chunks]
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            index[name] = StoredTensor(dtype=dtype, size=tuple(tensor.size), parts=parts)
        (Path(self.path) / _INDEX_FILE).write_bytes(_Index.dump_json(index))


class TensorReader(FileSystemReader):
    """Reads what TensorWriter wrote, from regular files with correct checksums."""

    def __init__(self, folder: Path, *, index_crc32: int, progressed: Callable[[], None]) -> None:
        """progressed: called for every 16 MiB. Raises InvalidArgument if the index is missing or damaged."""
        super().__init__(folder)
        self.fs, self._progressed = _RegularFiles(), progressed
        file = folder / _INDEX_FILE
        try:
            with named_if_denied(file):
                content = read_regular(file, max_bytes=_MAX_INDEX_BYTES)
        except OSError as error:
            raise InvalidArgument("path", f"{file} cannot be read: {error.strerror}") from error
        if zlib.crc32(content) != index_crc32:
            raise InvalidArgument("path", f"{file} is damaged: its checksum differs from the one in {FACTS_FILE}")
        try:
            self._metadata = _metadata(_Index.validate_json(content))
        except ValidationError as error:
            raise damaged(file, error) from error

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Sizes of the tensors, by name."""
        tensors = self._metadata.state_dict_metadata.items()
        return {name: tuple(tensor.size) for name, tensor in tensors if isinstance(tensor, TensorStorageMetadata)}

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


def _metadata(index: dict[str, StoredTensor]) -> Metadata:
    """Converts to the metadata that torch's reader expects."""
    tensors: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StoredPart] = {}
    for name, tensor in index.items():
        chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in tensor.parts]
        tensors[name] = TensorStorageMetadata(TensorProperties(getattr(torch, tensor.dtype)), torch.Size(tensor.size), chunks)
        for part in tensor.parts:
            stored[MetadataIndex(name, part.offsets)] = _StoredPart(part.file, part.start, part.num_bytes, crc32=part.crc32)
    return Metadata(tensors, storage_data=stored)
