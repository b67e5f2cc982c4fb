"""The tensors of a Hugging Face model folder, read from its files' headers and judged against its config.json. Needs no torch."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Never

from tasuki.models.config_json import LFS_START, refuse_pointer
from tasuki.models.family import CheckpointNames
from tasuki.models.folder_files import INDEX_FILE, WEIGHT_SUFFIXES, read_weight_map
from tasuki.models.known import find_family
from tasuki.models.shape import ModelShape
from tasuki.models.stored_values import BLOCK_BYTES, check_dtypes, check_written, differs
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tasuki.wire.regular_file import open_regular

SINGLE_FILE = "model.safetensors"
EMBEDDING, HEAD, VALUE_HEAD = "model.embed_tokens.weight", "lm_head.weight", "value_head.weight"
_MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
READ_DTYPES = ("F32", "BF16", "F16")
MXFP4, BLOCKS, SCALES = "MXFP4", "_blocks", "_scales"
"""Dtype of a tensor that is stored as two, named with these suffixes, and read as one."""
FP8, FP8_SCALES, FP8_BLOCK = "FP8", "_scale_inv", 128
"""The same for a matrix beside the factors of its blocks, squares of this size, which are named with this suffix."""
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_COMPUTED = (".inv_freq", ".cos_cached", ".sin_cached", ".position_ids", ".masked_bias")
_QUANTIZATIONS = ("hf_quant_config.json", "quant_model_description.json")
"""Files that SGLang reads in place of config.json's quantization_config."""
_AGAIN = "download or convert the model again"
_NUM_BLOCKS = 16
"""Blocks of an embedding that are compared at a start. The trainer compares all while it loads."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: Path
    dtype: str
    """safetensors' name, such as "BF16"."""
    shape: tuple[int, ...]
    offset: int
    """Its first byte in the file."""
    num_bytes: int
    scales: Path | None = None
    """With MXFP4 and FP8, the file of its scales; the rest is of its blocks, but the shape."""


def read_stored(folder: Path, *, key: str = "model.path") -> dict[str, StoredTensor]:
    """Every tensor by name. Reads only headers.

    Raises PathNotFound without weights in safetensors, PathPermissionDenied, and InvalidArgument for a file that is missing, cut off,
    damaged, not written to its end or no safetensors file, an index that differs from the files, a tensor that two files hold, and an
    adapter or the engine's quantization beside them.
    """
    with named_if_denied(folder, key=key):
        indexed = read_weight_map(folder, key=key)
        single = folder / SINGLE_FILE
        if indexed is None:
            if not os.path.lexists(single):
                raise _without_weights(folder, key=key)
            _refuse_beside(folder, key=key)
            _check_alone(single, key=key)
            whole = read_file(single, key=key)
            check_written(single, whole, key=key)
            return _paired(whole)
        _refuse_beside(folder, key=key)
        tensor_in = {file_name: name for name, file_name in sorted(indexed.items(), reverse=True)}
        if single.is_file() and SINGLE_FILE not in tensor_in:
            problem = f"{single} is not in {INDEX_FILE}, and readers disagree on which of the two counts; remove one of them"
            raise InvalidArgument(key, problem)
        files = {name: read_file(folder / name, key=key, tensor=tensor) for name, tensor in sorted(tensor_in.items())}
        for name, tensors in files.items():
            check_written(folder / name, tensors, key=key)
    return _paired(_joined(folder / INDEX_FILE, indexed, files, key=key))


def _paired(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """With one tensor [E, inputs, outputs] for each pair of blocks [E, outputs, inputs / 32, 16] and scales [E, outputs, inputs / 32], and
    one for each matrix in FP8 with its scales [rows / 128, columns / 128].
    """
    for name in [name for name in stored if name.endswith(BLOCKS)]:
        whole = name.removesuffix(BLOCKS)
        blocks, scales = stored[name], stored.get(whole + SCALES)
        if scales is None or {blocks.dtype, scales.dtype} != {"U8"}:
            continue
        if len(scales.shape) != 3 or blocks.shape != (*scales.shape, 16):
            continue
        num, rows, groups = scales.shape
        stored[whole] = replace(
            stored.pop(name), dtype=MXFP4, shape=(num, 32 * groups, rows), scales=stored.pop(whole + SCALES).file
        )
    for name in [name for name in stored if name.endswith(FP8_SCALES)]:
        matrix, scales = stored.get(name.removesuffix(FP8_SCALES)), stored[name]
        if matrix is None or (matrix.dtype, scales.dtype) != ("F8_E4M3", "F32"):
            continue
        if scales.shape == tuple(-(-size // FP8_BLOCK) for size in matrix.shape):
            stored[name.removesuffix(FP8_SCALES)] = replace(matrix, dtype=FP8, scales=stored.pop(name).file)
    return stored


def check_stored(
    folder: Path, model: ModelShape, *, key: str = "model.path", is_critic: bool = False
) -> dict[str, StoredTensor]:
    """Every tensor by name, in a folder that holds this model.

    Raises InvalidArgument naming a tensor that is missing, misshapen, of another dtype than the trainer reads, or read by no layer, and
    as read_stored, check_dtypes and check_head. is_critic: the LM head is not read.
    """
    stored = read_stored(folder, key=key)
    wanted = stored_shapes(model, stored)
    if is_critic:
        wanted.pop(HEAD, None)
    wanted |= {VALUE_HEAD: (1, model.hidden_size)} if VALUE_HEAD in stored else {}
    missing = [name for name in wanted if name not in stored]
    ignored = {VALUE_HEAD, HEAD} if is_critic or model.is_tied else {VALUE_HEAD}
    untrained = untrained_tensors(stored, model)
    known = {*wanted, *ignored, *untrained}
    unread = [name for name in stored if name not in known and not is_computed(name)]
    if missing:
        there = f"; its {_several(unread)} has no place in the model" if unread else ""
        cure = _AGAIN if missing != [HEAD] else f"set tie_word_embeddings to true if the embedding is the head, or {_AGAIN}"
        if not names_in(stored, model).has_whole_experts and all(
            any(".experts." in name for name in names) for names in (missing, unread)
        ):
            cure = "store each expert in tensors of its own, as published models do"
        raise InvalidArgument(key, f"{folder} lacks tensor {_several(missing)}, which its config.json asks for{there}; {cure}")
    for name in (*wanted, *untrained):
        tensor = stored[name]
        if (shape := wanted.get(name, tensor.shape)) != tensor.shape:
            problem = (
                f"{name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}; {_AGAIN}, or correct config.json"
            )
            raise InvalidArgument(key, f"{tensor.file}: {problem}")
        if tensor.dtype not in (*READ_DTYPES, MXFP4, FP8):
            problem = f"{name} is {tensor.dtype}, the trainer reads {', '.join(READ_DTYPES)}; convert the model to one of them"
            raise InvalidArgument(key, f"{tensor.file}: {problem}")
    if unread:
        problem = f"no layer of {model.architecture} with this config.json reads {_several(unread)}, so an export would lack it"
        raise InvalidArgument(
            key, f"{stored[unread[0]].file}: {problem}; correct config.json, or remove the tensor from the file"
        )
    check_dtypes({name: stored[name] for name in (*wanted, *untrained)}, key=key)
    if model.is_tied and not is_critic:
        check_head(stored, model, step=max(1, stored[embedding_name(model)].num_bytes // (BLOCK_BYTES * _NUM_BLOCKS)), key=key)
    return stored


def embedding_name(model: ModelShape) -> str:
    return find_family(model.architecture).checkpoint.tensor(EMBEDDING)


def check_head(
    stored: Mapping[str, StoredTensor], model: ModelShape, *, first: int = 0, step: int = 1, key: str = "model.path"
) -> None:
    """Raises InvalidArgument for an LM head in the files of a tied model that differs from its embedding: rollout and export would drop it,
    transformers would use it. first, step: blocks to compare; also the last one.
    """
    if HEAD not in stored:
        return
    head, name = stored[HEAD], embedding_name(model)
    embedding = stored[name]
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape) or differs(head, embedding, first=first, step=step):
        problem = f"{HEAD} differs from {name}, but config.json has tie_word_embeddings true"
        cure = "set it to false to use this head, or remove the tensor from the file to use the embedding"
        raise InvalidArgument(key, f"{head.file}: {problem}; {cure}")


def names_in(stored: Iterable[str], model: ModelShape) -> CheckpointNames:
    """Names of a model's tensors in a folder that holds `stored`: transformers saves published models' whole experts one by one."""
    names = find_family(model.architecture).checkpoint
    layers = f"{names.decoder}.layers."
    is_apart = not model.has_biased_experts and any(name.startswith(layers) and ".experts.0." in name for name in stored)
    return replace(names, has_whole_experts=False) if is_apart else names


def stored_shapes(model: ModelShape, stored: Iterable[str] = ()) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors, in a folder that holds `stored` or as published."""
    names = names_in(stored, model)
    shapes = {names.tensor(name): shape for name, shape in model.constants().items()}
    for name, shape in model.parameters().items():
        parts = names.fused(name)
        if not parts:
            shapes[names.tensor(name)] = shape
            continue
        rows = (shape[1] // len(parts), *shape[2:])
        shapes |= {names.expert(name, index, part): rows for index in range(shape[0]) for part in parts}
    return shapes


def untrained_tensors(stored: Mapping[str, StoredTensor], model: ModelShape) -> list[str]:
    """Names of the stored tensors of layers for speculation and of a vision tower, and `kept_tensors`: an export copies them unchanged."""
    layers, family = range(model.num_layers, model.num_layers + model.num_draft_layers), find_family(model.architecture)
    starts = (*(f"model.layers.{layer}." for layer in layers), *family.untrained)
    kept = set(map(family.checkpoint.tensor, model.kept_tensors()))
    return [name for name in stored if name.startswith(starts) or name in kept]


def is_computed(name: str) -> bool:
    """Whether a tensor is a buffer that older releases of transformers saved, and that every reader computes from config.json."""
    return name.endswith(_COMPUTED)


def _joined(
    index: Path, indexed: Mapping[str, str], files: Mapping[str, Mapping[str, StoredTensor]], *, key: str
) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for file_name, tensors in files.items():
        for name, tensor in tensors.items():
            if name in stored:
                raise InvalidArgument(key, f"{stored[name].file.name} and {tensor.file} both hold {name}; {_AGAIN}")
            if indexed.get(name) != file_name and not is_computed(name):
                says = f"names {indexed[name]}" if name in indexed else "does not name it"
                raise InvalidArgument(key, f"{tensor.file} holds {name}, but {index.name} {says}; {_AGAIN}")
            stored[name] = tensor
    for name, file_name in indexed.items():
        if name not in stored and not is_computed(name):
            raise InvalidArgument(key, f"{index} names {file_name} for {name!r}, which is not in it; {_AGAIN}")
    return stored


def read_file(file: Path, *, key: str, tensor: str = "") -> dict[str, StoredTensor]:
    """The tensors of one file. tensor: one that the index promises. Raises as read_stored."""
    holds = f" and should hold {tensor}" if tensor else ""

    def refuse(problem: str, cure: str = _AGAIN) -> Never:
        raise InvalidArgument(key, f"{file} {problem}; {cure}")

    try:
        with open_regular(file) as opened:
            num_bytes = os.fstat(opened.fileno()).st_size
            start = opened.read(len(LFS_START))
            refuse_pointer(start, file, field=key)
            length = int.from_bytes(start[:8], "little")
            if len(start) > 8 and (length > _MAX_HEADER_BYTES or start[8:9] != b"{"):
                refuse("is no safetensors file")
            if len(start) <= 8 or length > num_bytes - 8:
                refuse(f"is cut off: it has {num_bytes} bytes, and its header has {length}")
            opened.seek(8)
            header = opened.read(length)
    except PermissionError:
        raise
    except OSError as error:
        refuse(f"cannot be read ({error.strerror}){holds}", "check its links" if file.is_symlink() else _AGAIN)
    try:
        table = json.loads(header.decode(), object_pairs_hook=_unique)
        return _tensors(table, file, start=8 + length, end=num_bytes)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        refuse(f"is damaged: {error}")


def _tensors(table: dict[str, Any], file: Path, *, start: int, end: int) -> dict[str, StoredTensor]:
    """start, end: of the values in the file. Raises ValueError unless the tensors fill them in one piece, TypeError, KeyError."""
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its __metadata__ is no table of texts")
    stored: dict[str, StoredTensor] = {}
    for name, entry in table.items():
        if not name or not name.isprintable():
            raise ValueError(f"it has a tensor with the name {name!r:.80}")
        dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not all(type(size) is int and size >= 0 for size in (*shape, first, last)):
            raise ValueError(f"{name} has shape {shape!r:.80} at {first!r:.80} to {last!r:.80}")
        if dtype not in _BITS:
            raise ValueError(f"{name} has the unknown dtype {dtype!r:.80}")
        if 8 * (last - first) != math.prod(shape) * _BITS[dtype]:
            raise ValueError(f"{name} has shape {shape} of {dtype} in {last - first} bytes")
        stored[name] = StoredTensor(file, dtype, tuple(shape), start + first, last - first)
    spans = sorted((tensor.offset, tensor.offset + tensor.num_bytes, name) for name, tensor in stored.items())
    for (_, before, _), (first, _, name) in pairwise([(0, start, ""), *spans]):
        if first != before:
            raise ValueError(f"{name} begins at byte {first}, the tensor before it ends at {before}")
    needed = spans[-1][1] if spans else start
    if needed != end:
        raise ValueError(f"it has {end} bytes, its header describes {needed}{': it is cut off' if needed > end else ''}")
    return stored


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("its header has a name twice")
    return table


def _check_alone(single: Path, *, key: str) -> None:
    """Refuses a second file, which an engine that reads every file would load: it may hold the same weights under other names."""
    for file in sorted(single.parent.glob("*.safetensors")):
        if file.name != SINGLE_FILE and not file.name.startswith("consolidated"):
            problem = (
                f"{file} stands beside {SINGLE_FILE} without an {INDEX_FILE}, so readers disagree on which of the two counts"
            )
            raise InvalidArgument(key, f"{problem}; remove one of them")


def _refuse_beside(folder: Path, *, key: str) -> None:
    """Refuses what changes whole weights: an adapter, which transformers would add, also in an export, and the engine's quantization."""
    for file in (folder / name for name in _QUANTIZATIONS if (folder / name).exists()):
        raise InvalidArgument(key, f"{file} has the engine quantize the model, which tasuki does not; remove the file")
    for file in sorted(file for file in folder.iterdir() if file.name.startswith(("adapter_config.", "adapter_model"))):
        problem = f"{file} is of an adapter, which other readers add to the model beside it, and tasuki does not"
        cure = "merge it with PEFT, or move it to a folder for trainer.lora.path; remove it if it is merged already"
        raise InvalidArgument(key, f"{problem}; {cure}")


def _without_weights(folder: Path, *, key: str) -> PathNotFound:
    others = sorted(file.name for file in folder.iterdir() if file.suffix in WEIGHT_SUFFIXES)
    if any(name.startswith("model-") and name.endswith(".safetensors") for name in others):
        text = f"{folder} has {_several(others)} but no {INDEX_FILE}; download it"
    elif "adapter_model.safetensors" in others:
        text = f"{folder} has an adapter and no {SINGLE_FILE}; merge it into its model with PEFT, or download the model"
    else:
        there = f", only {_several(others)}" if others else ""
        text = f"{folder} has no {SINGLE_FILE} and no {INDEX_FILE}{there}; download them, or convert it with transformers' save_pretrained"
    return PathNotFound(f"{key}: {text}", path=folder)


def _several(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
