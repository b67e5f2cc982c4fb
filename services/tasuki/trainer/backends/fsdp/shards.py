"""Local shards of DTensors under their names in the Hugging Face checkpoint, for loading, publishing and exporting.

With a model that trainer and engine read in one copy, shards are views of an engine rank's slices: ranks shard by columns what the
engine's ranks hold by columns, and what every engine rank holds whole contains each shard.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tasuki.config.paths import base_socket_path
from tasuki.config.schema import NodeConfig
from tasuki.config.trainer_schema import LoraConfig
from tasuki.models.shape import CONSTANTS, SPLIT_BY_COLUMNS
from tasuki.trainer.backends.fsdp.lora.adapters import (
    adapted_parameters,
    adapter_parameters,
    adapter_tensors,
    base_parameters,
    family_of,
)
from tasuki.trainer.backends.fsdp.lora.merged_weights import expert_merges, merged
from tasuki.trainer.durable.atomic_folder import on_first_rank
from tasuki.trainer.durable.model_folder import write_model
from tasuki.trainer.modules.lora import write_adapter
from tasuki.weights.export import Shard, checkpoint_shards
from tasuki.weights.manifest import Entry
from tasuki.weights.shared_base import SharedBase, await_base
from tasuki.wire.errors import UnsupportedModel

_log = logging.getLogger("tasuki.trainer")


def local_shards(causal_lm: nn.Module) -> list[Shard]:
    """This rank's part of every checkpoint tensor, without adapters, as live views of the parameters. Tied tensors come once."""
    return shards_of(causal_lm, base_parameters(causal_lm))


def merged_shards(causal_lm: nn.Module) -> list[Shard]:
    """The same; experts with their adapters merged."""
    merges = expert_merges(causal_lm)
    return [
        replace(shard, write=merges.get(name))
        for name, param in base_parameters(causal_lm)
        for shard in shards_of(causal_lm, [(name, param)])
    ]


def constant_shards(causal_lm: nn.Module) -> list[Shard]:
    """Every checkpoint tensor that is not trained, whole on each rank."""
    names = family_of(causal_lm).checkpoint
    return [
        Shard(names.tensor(name), tuple(buffer.shape), (0,) * buffer.dim(), buffer, keeps_dtype=True)
        for name, buffer in causal_lm.named_buffers()
        if name.endswith(CONSTANTS)
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
    """Collective: gathers tensors one by one. See write_model.

    In the dtype that rollout serves, the tensors equal its own, bit for bit. Adapters are merged, and also saved in adapter/ for PEFT.
    """
    adapted = adapted_parameters(causal_lm)

    def tensors() -> Iterator[dict[str, Tensor]]:
        for name, param in base_parameters(causal_lm):
            tensor = merged(adapted[name], dtype) if name in adapted else param
            yield {shard.name: shard.local for shard in whole_tensors(causal_lm, name, tensor)}

    def last(folder: Path) -> None:
        if lora is not None:
            adapter, config = adapter_tensors(causal_lm), lora
            on_first_rank(lambda: write_adapter(folder / "adapter", adapter, config=config, source=source), path=path)

    constants = constant_shards(causal_lm)
    return write_model(path, tensors(), constants=constants, source=source, digests=digests, dtype=dtype, last=last)


def map_base(node: NodeConfig, *, rank: int, device: torch.device) -> SharedBase:
    """The engine rank's model, once it has loaded it, handed on to one that starts after it.

    Raises BadHandle when there is none within `coordinator.stage_timeout_s`.
    """
    path = base_socket_path(node.state_dir, "rollout", rank)
    base = await_base(path, device=device, timeout_s=node.coordinator.stage_timeout_s)
    base.hand_out(base_socket_path(node.state_dir, "trainer", rank))
    _log.info("event=base_mapped bytes=%d", base.num_bytes)
    return base


def engine_placement(causal_lm: nn.Module) -> Callable[[nn.Parameter], Split | None]:
    """FSDP2's `shard_placement_fn` for shards that are the slices of the engine's ranks. causal_lm: not yet sharded."""
    by_columns = {id(param): param for name, param in base_parameters(causal_lm) if name.endswith(SPLIT_BY_COLUMNS)}
    return lambda param: Split(1) if id(param) in by_columns else None


def views_in(base: SharedBase, causal_lm: nn.Module, *, otherwise: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Function that replaces a parameter by a view of the base, or by `otherwise` if it is not in the base.

    causal_lm: sharded, on meta. Raises UnsupportedModel for a parameter that is not in the base as the trainer has it.
    """
    views: dict[int, tuple[nn.Parameter, Tensor]] = {}
    tensors = base.tensors()
    for name, param in base_parameters(causal_lm):
        parts = shards_of(causal_lm, [(name, param)])
        if not parts:
            continue
        if len(parts) != 1 or parts[0].name not in tensors:
            raise _not_shared(name, "holds it in other parts")
        local = view_of(parts[0], *tensors[parts[0].name])
        sharded = cast(DTensor, param.detach())
        view = DTensor.from_local(
            local, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
        )
        views[id(param)] = param, view
    return lambda param: views[id(param)][1] if id(param) in views else otherwise(param)


def view_of(shard: Shard, entry: Entry, tensor: Tensor) -> Tensor:
    """The shard's values in an engine rank's slice of the same tensor, `tensor`. Raises UnsupportedModel where that lacks some."""
    starts = [start - first for start, first in zip(shard.offsets, entry.offsets, strict=True)]
    ends = [start + size for start, size in zip(starts, shard.local.shape, strict=True)]
    if all(start >= 0 and end <= size for start, end, size in zip(starts, ends, entry.sizes, strict=True)):
        view = tensor[tuple(map(slice, starts, ends))]
        if view.is_contiguous() and (entry.global_shape, view.dtype) == (shard.global_shape, shard.local.dtype):
            return view
    trainer = f"{list(shard.local.shape)} at {list(shard.offsets)} of {shard.local.dtype}"
    raise _not_shared(
        shard.name, f"rank holds {list(entry.sizes)} at {list(entry.offsets)} of {tensor.dtype}, the trainer's {trainer}"
    )


def _not_shared(name: str, problem: str) -> UnsupportedModel:
    return UnsupportedModel(f'rollout.lora: {name} cannot be shared: the engine {problem}; leave it at "merged"', tensor=name)
