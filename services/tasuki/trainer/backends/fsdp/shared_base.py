"""The trainer's end of a model that trainer and engine read in one copy: parameters that are views of the engine's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tasuki.config.places import base_socket_path
from tasuki.config.schema import NodeConfig
from tasuki.trainer.backends.fsdp.lora import base_parameters
from tasuki.trainer.backends.fsdp.shards import shards_of
from tasuki.transport.shared_base import SharedBase, await_base
from tasuki.wire.errors import UnsupportedModel

_log = logging.getLogger("tasuki.trainer")


def map_base(node: NodeConfig, *, device: torch.device) -> SharedBase | None:
    """The engine's model, once it has loaded it, handed on to an engine that starts after it; None where it is not shared.

    Raises BadHandle when there is none within `rollout.start_timeout_s`.
    """
    if not node.shares_base:
        return None
    path = base_socket_path(node.state_dir, "rollout")
    base = await_base(path, device=device, timeout_s=node.rollout.start_timeout_s)
    base.hand_out(base_socket_path(node.state_dir, "trainer"))
    _log.info("event=base_mapped bytes=%d", base.num_bytes)
    return base


def views_in(base: SharedBase, causal_lm: nn.Module, *, otherwise: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What takes a parameter's place: a view of the base, or `otherwise` of what is not in the base.

    causal_lm: sharded, on meta. Raises UnsupportedModel for a parameter that is not in the base as the trainer has it.
    """
    views: dict[int, tuple[nn.Parameter, Tensor]] = {}
    tensors = base.tensors()
    for name, param in base_parameters(causal_lm):
        shards = shards_of(causal_lm, [(name, param)])
        if len(shards) != 1 or shards[0].name not in tensors:
            raise _not_shared(name, "holds it in other parts")
        entry, tensor = tensors[shards[0].name]
        local = shards[0].local
        if (shards[0].offsets, tuple(local.shape), local.dtype) != (entry.offsets, entry.sizes, tensor.dtype):
            raise _not_shared(
                name, f"has {list(tensor.shape)} of {tensor.dtype}, the trainer {list(local.shape)} of {local.dtype}"
            )
        sharded = cast(DTensor, param.detach())
        view = DTensor.from_local(
            tensor, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
        )
        views[id(param)] = param, view
    return lambda param: views[id(param)][1] if id(param) in views else otherwise(param)


def _not_shared(name: str, problem: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"trainer.lora.share_base: {name} cannot be shared: the engine {problem}; leave it out", tensor=name
    )
