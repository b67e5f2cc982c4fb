"""Local shards of DTensors under their names in the Hugging Face checkpoint, for loading, publishing and exporting."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tasuki.models.families import find_family
from tasuki.models.family import CheckpointNames
from tasuki.models.folder_files import INDEX_FILE
from tasuki.trainer.backends.fsdp.lora.adapters import adapter_parameters, base_parameters
from tasuki.weights.shards import Shard, checkpoint_shards
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tasuki.wire.regular_file import open_regular

SINGLE_FILE = "model.safetensors"
_BLOCK_BYTES = 64 << 20


def local_shards(causal_lm: nn.Module) -> list[Shard]:
    """This rank's part of every checkpoint tensor, without adapters, as live views of the parameters. Tied tensors come once."""
    return shards_of(causal_lm, base_parameters(causal_lm))


def adapter_shards(causal_lm: nn.Module) -> list[Shard]:
    """The same of every adapter's A and B."""
    return shards_of(causal_lm, adapter_parameters(causal_lm))


def head_shards(critic: nn.Module) -> list[Shard]:
    """This rank's part of a critic's head, as `value_head.weight`."""
    head = critic.get_submodule("value_head")
    return shards_of(
        critic.get_submodule("causal_lm"), ((f"value_head.{name}", param) for name, param in head.named_parameters())
    )


def shards_of(causal_lm: nn.Module, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[Shard]:
    """The same of these parameters, by their own names."""
    names = _checkpoint_names(causal_lm)
    shards: list[Shard] = []
    for name, param in parameters:
        assert isinstance(param, DTensor), "fully_shard makes every parameter a DTensor"
        # Split as by torch.chunk, in any dimension: the last ranks have less or nothing.
        _, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        local = cast(DTensor, param.detach()).to_local()
        shards += checkpoint_shards(name, tuple(param.shape), offsets, local, names=names)
    return shards


def whole_tensors(causal_lm: nn.Module, name: str, param: Tensor) -> list[Shard]:
    """The checkpoint tensors behind one parameter of `causal_lm`, gathered. Collective."""
    assert isinstance(param, DTensor), "fully_shard makes every parameter a DTensor"
    whole = cast(DTensor, param.detach()).full_tensor()
    return checkpoint_shards(name, tuple(param.shape), (0,) * param.dim(), whole, names=_checkpoint_names(causal_lm))


def _checkpoint_names(causal_lm: nn.Module) -> CheckpointNames:
    # FSDP renames the class of modules that it shards.
    return find_family(type(causal_lm).__name__.removeprefix("FSDP")).checkpoint


@torch.no_grad()
def load_shards(folder: Path, shards: Sequence[Shard]) -> None:
    """Fills the shards from the safetensors of a Hugging Face folder, reading only their slices.

    Raises PathNotFound without safetensors, InvalidArgument for a damaged file or a tensor that is missing or misshapen.
    """
    file_of = tensor_files(folder)
    for shard in shards:
        if shard.name not in file_of:
            raise InvalidArgument("model.path", f"{folder} lacks tensor {shard.name}, which its config.json asks for")
    with ExitStack() as stack:
        names = sorted({file_of[shard.name] for shard in shards})
        opened = {name: stack.enter_context(_opened(folder / name)) for name in names}
        for shard in shards:
            stored = opened[file_of[shard.name]].get_slice(shard.name)
            if tuple(stored.get_shape()) != shard.global_shape:
                problem = (
                    f"{folder}: {shard.name} has shape {stored.get_shape()}, config.json asks for {list(shard.global_shape)}"
                )
                raise InvalidArgument("model.path", problem)
            _fill(shard.local, stored[tuple(map(slice, shard.offsets, shard.box.ends))])


def _fill(local: Tensor, stored: Tensor) -> None:
    """Copies and casts blocks of rows. A GPU casts its own: torch would cast the whole tensor on one core of the host."""
    if not local.numel():
        return
    num_rows = max(1, _BLOCK_BYTES * len(stored) // stored.nbytes)
    for target, source in zip(local.split(num_rows), stored.split(num_rows), strict=True):
        target.copy_(source.to(local.device))


def tensor_files(folder: Path) -> dict[str, str]:
    """Name of the file that holds each tensor of a Hugging Face folder. Raises PathNotFound without safetensors."""
    if (folder / INDEX_FILE).is_file():
        weight_map: dict[str, str] = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        return weight_map
    if not (folder / SINGLE_FILE).is_file():
        raise PathNotFound(f"model.path: {folder} has no {SINGLE_FILE}; other weight formats are not read", path=folder)
    with _opened(folder / SINGLE_FILE) as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)


def _opened(file: Path) -> safe_open:
    try:
        with named_if_denied(file, key="model.path"):
            open_regular(file).close()  # safe_open would block on a FIFO
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InvalidArgument("model.path", f"{file} is damaged or missing: {error}") from error
