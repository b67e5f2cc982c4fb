"""The files of a checkpoint: torch.distributed.checkpoint writes and reads the tensors; their index is JSON, since torch's own is a pickle.

Whoever can write a pickle can run what he likes in the process that reads it. Tensors are read with `weights_only`, which does not.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError, model_validator
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tasuki.wire.errors import InvalidArgument

_INDEX_FILE = "tensors.json"
_Sizes = tuple[NonNegativeInt, ...]


def _known_dtype(name: str) -> str:
    if not isinstance(vars(torch).get(name), torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return name


class _Part(BaseModel):
    """A block of a tensor: where it begins, its sizes, and the bytes of a file that hold it."""

    model_config = ConfigDict(extra="forbid")
    offsets: _Sizes
    sizes: _Sizes
    file: Annotated[str, Field(pattern=r"^\w+\.distcp$")]
    start: NonNegativeInt
    num_bytes: NonNegativeInt


class _Tensor(BaseModel):
    model_config = ConfigDict(extra="forbid")
    dtype: Annotated[str, AfterValidator(_known_dtype)]
    size: _Sizes
    parts: list[_Part]

    @model_validator(mode="after")
    def _parts_are_the_whole(self) -> _Tensor:
        """Torch would leave what no part covers as it finds it."""
        if sum(math.prod(part.sizes) for part in self.parts) != math.prod(self.size):
            raise ValueError("its parts are not the whole tensor")
        return self


_Index = TypeAdapter(dict[str, _Tensor])


class TensorWriter(FileSystemWriter):
    """Writes tensors, and their index beside them. Says what the disk said."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save closes its archive when a write has failed, and that fails as well: the disk's error is the one before.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        index: dict[str, _Tensor] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), "a checkpoint holds tensors alone"
            parts = [_part(chunk, stored[MetadataIndex(name, chunk.offsets)]) for chunk in tensor.chunks]
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            index[name] = _Tensor(dtype=dtype, size=tuple(tensor.size), parts=parts)
        (Path(self.path) / _INDEX_FILE).write_bytes(_Index.dump_json(index))


class TensorReader(FileSystemReader):
    """Reads what TensorWriter has written."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidArgument when the index is missing or damaged."""
        super().__init__(folder)
        file = folder / _INDEX_FILE
        try:
            self._metadata = _metadata(_Index.validate_json(file.read_bytes()))
        except OSError as error:
            raise InvalidArgument("path", f"{file} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            raise damaged(file, error) from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def damaged(file: Path, error: ValidationError) -> InvalidArgument:
    """What to tell of a checkpoint's file that does not hold what it should."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return InvalidArgument("path", f"{file} is damaged: {f'{place}: ' if place else ''}{first['msg']}")


def _part(chunk: ChunkStorageMetadata, stored: _StorageInfo) -> _Part:
    return _Part(
        offsets=tuple(chunk.offsets),
        sizes=tuple(chunk.sizes),
        file=stored.relative_path,
        start=stored.offset,
        num_bytes=stored.length,
    )


def _metadata(index: dict[str, _Tensor]) -> Metadata:
    """As torch's reader would have it."""
    tensors: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for name, tensor in index.items():
        chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in tensor.parts]
        tensors[name] = TensorStorageMetadata(TensorProperties(getattr(torch, tensor.dtype)), torch.Size(tensor.size), chunks)
        for part in tensor.parts:
            stored[MetadataIndex(name, part.offsets)] = _StorageInfo(part.file, part.start, part.num_bytes)
    return Metadata(tensors, storage_data=stored)
