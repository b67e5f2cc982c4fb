"""The trainer's end of a model that trainer and engine read in one copy: shards that are views of an engine rank's slices.

Ranks shard by columns what the engine's ranks hold by columns. What every engine rank holds whole contains each shard.
"""

import logging
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tasuki.config.paths import base_socket_path
from tasuki.config.schema import NodeConfig
from tasuki.models.shape import SPLIT_BY_COLUMNS
from tasuki.trainer.backends.fsdp.lora.adapters import base_parameters
from tasuki.trainer.backends.fsdp.shards import shards_of
from tasuki.weights import shards
from tasuki.weights.manifest import Entry
from tasuki.weights.shared_base import SharedBase, await_base
from tasuki.wire.errors import UnsupportedModel

_log = logging.getLogger("tasuki.trainer")


def map_base(node: NodeConfig, *, rank: int, device: torch.device) -> SharedBase:
    """The engine rank's model, once it has loaded it, handed on to one that starts after it.

    Raises BadHandle when there is none within `coordinator.stage_timeout_s`.
    """
    path = base_socket_path(node.state_dir, "rollout", rank)
    base = await_base(path, device=device, timeout_s=node.coordinator.stage_timeout_s)
    base.hand_out(base_socket_path(node.state_dir, "trainer", rank))
    _log.info("event=base_mapped bytes=%d", base.num_bytes)
    return base


def engine_placement(causal_lm: nn.Module) -> Callable[[nn.Parameter], Shard | None]:
    """FSDP2's `shard_placement_fn` for shards that are the slices of the engine's ranks. causal_lm: not yet sharded."""
    by_columns = {id(param): param for name, param in base_parameters(causal_lm) if name.endswith(SPLIT_BY_COLUMNS)}
    return lambda param: Shard(1) if id(param) in by_columns else None


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


def view_of(shard: shards.Shard, entry: Entry, tensor: Tensor) -> Tensor:
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
