"""Exports the policy as a Hugging Face folder: the initial model's files, with trained weights in the same names and dtypes."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tasuki.models.folder_files import INDEX_FILE
from tasuki.trainer.backends.fsdp.lora.adapters import adapter_tensors, base_parameters, write_adapter
from tasuki.trainer.backends.fsdp.lora.merged_weights import MergedWeights
from tasuki.trainer.backends.fsdp.shards import SINGLE_FILE, tensor_files, whole_tensors
from tasuki.trainer.durable.atomic_folder import delete_aside, folder_bytes, on_first_rank, rename_into_place, start_aside
from tasuki.wire.errors import TasukiError

_OS_CODE = re.compile(r"(?:code: |os error )(\d+)")
_MAX_FILE_BYTES = 4 * 2**30
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}


def export_model(path: Path, *, causal_lm: nn.Module, source: Path) -> int:
    """Collective: gathers tensors one by one; rank 0 writes them. Returns the bytes written.

    Tensors keep their dtype in `source`, so that from_pretrained treats both models alike. With bfloat16 weights they equal those that
    rollout serves, bit for bit. Adapters are merged, and also saved in adapter/ for PEFT.
    Raises PathExists, DiskFull, and InvalidArgument for a folder that cannot be written.
    """
    aside = start_aside(path)
    writer = _SafetensorsWriter(aside, source=source)
    adapted = MergedWeights(causal_lm).by_name
    try:
        for name, param in base_parameters(causal_lm):
            tensor = adapted[name].merged(writer.merged_dtype) if name in adapted else param
            tensors = {shard.name: shard.local for shard in whole_tensors(causal_lm, name, tensor)}
            on_first_rank(lambda tensors=tensors: writer.add(tensors), path=path)
        on_first_rank(writer.finish, path=path)
        on_first_rank(lambda: _copy_other_files(source, aside), path=path)
        if adapted:
            adapter = adapter_tensors(causal_lm)
            on_first_rank(lambda: write_adapter(aside / "adapter", adapter, causal_lm=causal_lm, source=source), path=path)
    except TasukiError:
        delete_aside(aside, path=path)
        raise
    rename_into_place(aside, path)
    return folder_bytes(path)


class _SafetensorsWriter:
    """Writes tensors to files of bounded size as they arrive."""

    def __init__(self, folder: Path, *, source: Path) -> None:
        self._folder = folder
        self._dtypes = _stored_dtypes(source)
        self._pending: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._total_bytes = 0

    @property
    def merged_dtype(self) -> torch.dtype:
        """Dtype in which adapters are merged, so that each number is rounded once."""
        return torch.bfloat16 if set(self._dtypes.values()) == {torch.bfloat16} else torch.float32

    def add(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            # Copied, because parts of fused experts share memory, which safetensors refuses.
            self._pending[name] = tensor.to("cpu", self._dtypes[name], copy=True).contiguous()
        if sum(tensor.nbytes for tensor in self._pending.values()) >= _MAX_FILE_BYTES:
            self._flush()

    def finish(self) -> None:
        """Writes the rest. Several files get Hugging Face's names and index."""
        self._flush()
        if len(self._files) == 1:
            self._file(0).rename(self._folder / SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._files):
            file_name = f"model-{index + 1:05d}-of-{len(self._files):05d}.safetensors"
            self._file(index).rename(self._folder / file_name)
            weight_map |= dict.fromkeys(names, file_name)
        table = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._folder / INDEX_FILE).write_text(json.dumps(table, indent=2))

    def _flush(self) -> None:
        if self._pending:
            file = self._file(len(self._files))
            _save(self._pending, file)
            # safetensors creates files readable by their owner only; the rest of the folder follows the umask.
            file.chmod(0o644)
            self._total_bytes += sum(tensor.nbytes for tensor in self._pending.values())
            self._files.append(list(self._pending))
            self._pending = {}

    def _file(self, index: int) -> Path:
        return self._folder / f"part-{index}.safetensors"


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """Raises OSError, which safetensors reports only as text."""
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        code = _OS_CODE.search(str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def _stored_dtypes(source: Path) -> dict[str, torch.dtype]:
    dtypes: dict[str, torch.dtype] = {}
    files = tensor_files(source)
    for file_name in sorted(set(files.values())):
        with safe_open(source / file_name, framework="pt") as file:
            dtypes |= {name: _DTYPES[file.get_slice(name).get_dtype()] for name in file.keys()}  # noqa: SIM118 - not a dict
    return dtypes


def _copy_other_files(source: Path, folder: Path) -> None:
    """Copies configuration, generation configuration and tokenizer: everything but weights."""
    for file in source.iterdir():
        if file.is_file() and file.suffix not in _WEIGHT_SUFFIXES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
