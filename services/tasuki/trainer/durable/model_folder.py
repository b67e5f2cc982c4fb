"""Hugging Face model folders: config.json, slices of their tensors, and whole tensors written under the same names."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from tasuki.models.config_json import read_json_object
from tasuki.models.family import TOWER_KEYS, CheckpointNames
from tasuki.models.folder_files import INDEX_FILE, file_digest, other_files
from tasuki.models.known import FAMILIES, read_model, read_model_shape
from tasuki.models.stored_tensors import BLOCKS, FP8, FP8_BLOCK, FP8_SCALES, SCALES, SINGLE_FILE, read_stored, untrained_tensors
from tasuki.models.tokenizer import CHAT_TEMPLATES
from tasuki.trainer.durable.atomic_folder import delete_aside, on_first_rank, rename_into_place, start_aside
from tasuki.trainer.durable.saves import folder_bytes
from tasuki.weights.export import Shard, checkpoint_shards
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, PathNotFound, TasukiError, UnsupportedModel
from tasuki.wire.regular_file import open_regular

# All have `model`, a stack of `model.layers`, and `lm_head`.
ARCHITECTURES = tuple(FAMILIES)


def read_model_config(path: Path) -> PreTrainedConfig:
    """config.json of a model folder.

    Raises PathNotFound without the folder or file; UnsupportedModel for an architecture not in ARCHITECTURES, quantized weights, or an
    unsupported key; InvalidArgument for a file that transformers cannot read.
    """
    with named_if_denied(path, key="model.path"):
        if not (path / "config.json").is_file():
            raise PathNotFound(f"model.path: {path} is not a Hugging Face model folder: config.json is missing", path=path)
        open_regular(path / "config.json").close()  # transformers' error for a denied file is that of a missing one
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError, AttributeError, StrictDataclassError) as error:
        raise _unreadable(path, error) from error
    architecture = next(iter(config.architectures or []), "none")
    if architecture not in ARCHITECTURES:
        text = f"the trainer does not know architecture {architecture}; it knows {', '.join(ARCHITECTURES)}"
        raise UnsupportedModel(text, architecture=architecture)
    family = FAMILIES[architecture]
    if getattr(config, "quantization_config", None) is not None and "quantization_config" not in family.keys:
        text = f"{path} holds quantized weights; the trainer needs floating-point ones"
        raise UnsupportedModel(text, architecture=architecture)
    read_model(read_json_object(path / "config.json", field="model.path"))
    vars(config).pop("quantization_config", None)  # its weights are dequantized
    if not family.text_module:
        return config
    text = config.get_text_config()
    text.update({"architectures": [architecture], "tie_word_embeddings": config.tie_word_embeddings})
    if family.has_tower:
        text.update({key: config.to_dict()[key] for key in TOWER_KEYS})
    return text


def _unreadable(path: Path, error: Exception) -> InvalidArgument | UnsupportedModel:
    """Converts transformers' ValueError, raised both for an unknown model type and for a broken file."""
    first_line = str(error).splitlines()[0]
    if "model type" in first_line:
        text = f"{path}: {first_line} The trainer knows {', '.join(ARCHITECTURES)}"
        return UnsupportedModel(text, architecture="unknown")
    return InvalidArgument("model.path", f"{path}/config.json cannot be read: {first_line}")


_BLOCK_BYTES = 64 << 20
_OS_CODE = re.compile(r"(?:code: |os error )(\d+)")
_MAX_FILE_BYTES = 4 * 2**30


@torch.no_grad()
def load_shards(folder: Path, shards: Sequence[Shard]) -> None:
    """Fills the shards from the safetensors of a Hugging Face folder, reading only their slices.

    Experts may be stored one by one. Dequantizes MXFP4, expert by expert, and FP8. Raises PathNotFound without safetensors,
    InvalidArgument for a damaged file or a tensor that is missing or misshapen.
    """
    stored = read_stored(folder)
    shards = [part for shard in shards for part in ([shard] if shard.name in stored else _apart(shard))]
    for shard in shards:
        if shard.name not in stored:
            raise InvalidArgument("model.path", f"{folder} lacks tensor {shard.name}, which its config.json asks for")
        if (shape := stored[shard.name].shape) != shard.global_shape:
            problem = f"{folder}: {shard.name} has shape {list(shape)}, config.json asks for {list(shard.global_shape)}"
            raise InvalidArgument("model.path", problem)
    with ExitStack() as stack:
        tensors = [stored[shard.name] for shard in shards]
        files = {file for tensor in tensors for file in (tensor.file, tensor.scales) if file is not None}
        opened = {file: stack.enter_context(_opened(file)) for file in files}
        for shard, stored_as in zip(shards, tensors, strict=True):
            part = tuple(map(slice, shard.offsets, shard.box.ends))
            if stored_as.scales is None:
                _fill(shard.local, opened[stored_as.file].get_slice(shard.name)[part])
            elif stored_as.dtype == FP8:
                matrix = opened[stored_as.file].get_slice(shard.name)[part].to(shard.local.device)
                scales = opened[stored_as.scales].get_tensor(shard.name + FP8_SCALES)
                shard.local.copy_(_scaled(matrix, scales, *part))
            else:
                blocks = opened[stored_as.file].get_slice(shard.name + BLOCKS)
                scales = opened[stored_as.scales].get_slice(shard.name + SCALES)
                for index, local in enumerate(shard.local, start=shard.offsets[0]):
                    expert = (each[index : index + 1][0].to(local.device) for each in (blocks, scales))
                    local.copy_(_dequantized(*expert).T[part[1:]])


def _apart(shard: Shard) -> list[Shard]:
    """The shards of a layer's experts one by one, as transformers saves them; `shard` itself of anything else."""
    names = CheckpointNames()
    if not names.fused(shard.name):
        return [shard]
    return checkpoint_shards(shard.name, shard.global_shape, shard.offsets, shard.local, names=names)


def _scaled(matrix: Tensor, scales: Tensor, rows: slice, columns: slice) -> Tensor:
    """The part of a matrix in FP8 as float32. scales: of all blocks."""
    for dim, part in enumerate((rows, columns)):
        blocks = torch.arange(part.start, part.stop, device=scales.device) // FP8_BLOCK
        scales = scales.index_select(dim, blocks)
    return matrix.float() * scales.to(matrix.device)


def _dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """[R, 32 G] float32 of MXFP4, exact also in bfloat16: 32 values of 4 bits (e2m1) with one exponent (e8m0).

    blocks: [R, G, 16] uint8, the first of two values in the lower half. scales: [R, G] uint8.
    Source: OCP Microscaling Formats v1.0, sec. 5.
    """
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=blocks.device)
    fours = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(torch.cat([positive, -positive])[fours.int()], (scales.int() - 127).unsqueeze(-1)).flatten(-2)


def _fill(local: Tensor, stored: Tensor) -> None:
    """Copies and casts blocks of rows. A GPU casts its own: torch would cast the whole tensor on one core of the host."""
    if not local.numel():
        return
    num_rows = max(1, _BLOCK_BYTES * len(stored) // stored.nbytes)
    for target, source in zip(local.split(num_rows), stored.split(num_rows), strict=True):
        target.copy_(source.to(local.device))


def _opened(file: Path) -> safe_open:
    try:
        with named_if_denied(file, key="model.path"):
            open_regular(file).close()  # safe_open would block on a FIFO
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InvalidArgument("model.path", f"{file} is damaged or missing: {error}") from error


class SafetensorsWriter:
    """Writes tensors to files of bounded size as they arrive."""

    def __init__(self, folder: Path, *, dtype: torch.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        self._pending: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._total_bytes = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            # Copied, because parts of fused experts share memory, which safetensors refuses.
            self._pending[name] = tensor.to("cpu", self._dtype, copy=True).contiguous()
        if sum(tensor.nbytes for tensor in self._pending.values()) >= _MAX_FILE_BYTES:
            self._flush()

    def add_untrained(self, constants: Sequence[Shard], *, source: Path) -> None:
        """Adds the constants, whole, and what is not trained as it is in `source`, all in their own dtypes but FP8."""
        stored = read_stored(source)
        self._pending |= {shard.name: shard.local.to("cpu", copy=True) for shard in constants}
        for name in untrained_tensors(stored, read_model_shape(source)):
            with _opened(stored[name].file) as file:
                self._pending[name] = file.get_tensor(name)
            if stored[name].dtype == FP8:
                local = torch.empty(stored[name].shape, dtype=self._dtype)
                load_shards(source, [Shard(name, local.shape, (0, 0), local)])
                self._pending[name] = local

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
            save_tensors(self._pending, file)
            self._total_bytes += sum(tensor.nbytes for tensor in self._pending.values())
            self._files.append(list(self._pending))
            self._pending = {}

    def _file(self, index: int) -> Path:
        return self._folder / f"part-{index}.safetensors"


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """The file is as private as its folder. Raises OSError, which safetensors reports only as text."""
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        code = _OS_CODE.search(str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
    file.chmod(file.parent.stat().st_mode & 0o666)  # safetensors creates files readable by their owner only


def write_model(
    path: Path,
    tensors: Iterable[dict[str, Tensor]],
    *,
    constants: Sequence[Shard] = (),
    source: Path,
    digests: Mapping[str, str],
    dtype: torch.dtype,
    last: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Collective: rank 0 writes a model folder, all or nothing. Returns the bytes written.

    tensors: whole ones, by checkpoint name, a few at a time; every rank iterates. constants: whole on each rank. source: the folder of the
    initial weights. digests: of its texts at the start. dtype: of every tensor and in config.json. last: called on every rank with the
    unfinished folder. Raises PathExists, DiskFull, and InvalidArgument for a folder that cannot be written, or a text that has changed.
    """
    aside = start_aside(path, mode=0o777)  # less the umask: a model may be shared
    writer = SafetensorsWriter(aside, dtype=dtype)
    try:
        for some in tensors:
            on_first_rank(partial(writer.add, some), path=path)
        on_first_rank(lambda: writer.add_untrained(constants, source=source), path=path)
        on_first_rank(writer.finish, path=path)
        on_first_rank(lambda: copy_other_files(source, aside, dtype=dtype, digests=digests), path=path)
        last(aside)
    except TasukiError:
        delete_aside(aside, path=path)
        raise
    rename_into_place(aside, path)
    return folder_bytes(path)


def copy_other_files(source: Path, folder: Path, *, dtype: torch.dtype, digests: Mapping[str, str] | None = None) -> None:
    """Copies configuration, generation configuration and tokenizer: everything but weights. dtype: of the weights, for config.json.

    digests: as text_digests had them at the start. Raises InvalidArgument naming a file that is another now.
    """
    try:
        for name, digest in (digests or {}).items():
            if file_digest(source / name) != digest:
                text = f"{source / name} has changed since the node started; restore it, then --resume exports the model"
                raise InvalidArgument("model.path", text)
        for file in other_files(source):
            shutil.copyfile(file, folder / file.name)
        if (source / CHAT_TEMPLATES).is_dir():
            shutil.copytree(source / CHAT_TEMPLATES, folder / CHAT_TEMPLATES)
    except FileNotFoundError as error:
        text = f"{error.filename} was there at the start and is gone; restore the folder, then --resume exports the model"
        raise PathNotFound(f"model.path: {text}", path=source) from error
    config = read_json_object(folder / "config.json", field="model.path")
    keys = config.keys() & {"dtype", "torch_dtype"} or {"torch_dtype"}  # the older name, which every transformers reads
    config |= dict.fromkeys(keys, str(dtype).removeprefix("torch."))
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
