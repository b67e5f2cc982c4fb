"""Local shards of DTensors under their names in the Hugging Face checkpoint, for loading, publishing and exporting."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tasuki.config.trainer_schema import LoraConfig
from tasuki.models.shape import ROUTER_BIAS
from tasuki.trainer.backends.fsdp.lora.adapters import (
    adapted_parameters,
    adapter_parameters,
    adapter_tensors,
    base_parameters,
    family_of,
    write_adapter,
)
from tasuki.trainer.backends.fsdp.lora.merged_weights import merged
from tasuki.trainer.durable.atomic_folder import delete_aside, folder_bytes, on_first_rank, rename_into_place, start_aside
from tasuki.trainer.durable.model_folder import SafetensorsWriter, copy_other_files
from tasuki.weights.shards import Shard, checkpoint_shards
from tasuki.wire.errors import TasukiError


def local_shards(causal_lm: nn.Module) -> list[Shard]:
    """This rank's part of every checkpoint tensor, without adapters, as live views of the parameters. Tied tensors come once."""
    return shards_of(causal_lm, base_parameters(causal_lm))


def constant_shards(causal_lm: nn.Module) -> list[Shard]:
    """Every checkpoint tensor that is not trained, whole on each rank."""
    names = family_of(causal_lm).checkpoint
    return [
        Shard(names.tensor(name), tuple(buffer.shape), (0,) * buffer.dim(), buffer, keeps_dtype=True)
        for name, buffer in causal_lm.named_buffers()
        if name.endswith(ROUTER_BIAS)
    ]


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
    names = family_of(causal_lm).checkpoint
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
    return checkpoint_shards(name, tuple(param.shape), (0,) * param.dim(), whole, names=family_of(causal_lm).checkpoint)


def export_model(
    path: Path, *, causal_lm: nn.Module, source: Path, digests: Mapping[str, str], dtype: torch.dtype, lora: LoraConfig | None
) -> int:
    """Collective: gathers tensors one by one; rank 0 writes them. Returns the bytes written.

    source: the folder of the initial weights. digests: of its texts at the start. dtype: of every tensor and in config.json. In the dtype
    that rollout serves, the tensors equal its own, bit for bit. Adapters are merged, and also saved in adapter/ for PEFT.
    Raises PathExists, DiskFull, and InvalidArgument for a folder that cannot be written, or a text that has changed.
    """
    aside = start_aside(path, mode=0o777)  # less the umask: a model may be shared
    writer = SafetensorsWriter(aside, dtype=dtype)
    adapted = adapted_parameters(causal_lm)
    try:
        for name, param in base_parameters(causal_lm):
            tensor = merged(adapted[name], dtype) if name in adapted else param
            tensors = {shard.name: shard.local for shard in whole_tensors(causal_lm, name, tensor)}
            on_first_rank(lambda tensors=tensors: writer.add(tensors), path=path)
        constants = constant_shards(causal_lm)
        on_first_rank(lambda: writer.add_untrained(constants, source=source), path=path)
        on_first_rank(writer.finish, path=path)
        on_first_rank(lambda: copy_other_files(source, aside, dtype=dtype, digests=digests), path=path)
        if lora is not None:
            adapter = adapter_tensors(causal_lm)
            on_first_rank(lambda: write_adapter(aside / "adapter", adapter, config=lora, source=source), path=path)
    except TasukiError:
        delete_aside(aside, path=path)
        raise
    rename_into_place(aside, path)
    return folder_bytes(path)
