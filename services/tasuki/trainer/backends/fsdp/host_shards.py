"""Shards of a frozen network that stay in host memory, pinned on a GPU. FSDP2 copies each group's as it gathers the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from tasuki.memory.granularity import ALIGNMENT, rounded_up
from tasuki.trainer.backends.fsdp.host_buffers import release_buffers, take_buffers
from tasuki.trainer.backends.fsdp.mesh import mesh_device


class HostShards:
    """Host memory for one network's shards, taken once."""

    def __init__(self, mesh: DeviceMesh, *, setting: str, advice: str) -> None:
        """setting, advice: as for take_buffers."""
        self._mesh, self._setting, self._advice = mesh, setting, advice
        self._buffers: list[Tensor] = []

    @property
    def policy(self) -> CPUOffloadPolicy:
        return CPUOffloadPolicy(pin_memory=self._mesh.device_type == "cuda")

    def make(self, network: nn.Module) -> Callable[[Tensor], Tensor]:
        """Function that replaces a parameter by its shard in this memory. network: sharded, on meta. Collective. Raises as take_buffers.

        FSDP2 copies a shard that it has to pad, so those stay outside.
        """
        sizes = {id(param): _local(param).nbytes for param in network.parameters() if _is_even(param)}
        starts, total = dict[int, int](), 0
        for key, size in sizes.items():
            starts[key], total = total, total + rounded_up(size, ALIGNMENT)
        self._buffers = take_buffers(self._mesh, [total], setting=self._setting, advice=self._advice)

        def place(param: Tensor) -> Tensor:
            made = torch.empty_like(param, device="cpu")
            if id(param) in starts:
                local, start = _local(made), starts[id(param)]
                view = self._buffers[0][start : start + local.nbytes].view(local.dtype).view(local.shape)
                cast(Any, local).set_(view)  # torch declares it for storages alone
            return made

        return place

    def close(self) -> None:
        """Waits for copies and frees the memory."""
        release_buffers(self._buffers, device=mesh_device(self._mesh))
        self._buffers = []


@torch.no_grad()
def _local(param: Tensor) -> Tensor:
    """The shard itself, not a view of it."""
    return cast(DTensor, param).to_local()


def _is_even(param: Tensor) -> bool:
    assert isinstance(param, DTensor)
    return param.shape[0] % param.device_mesh.size() == 0
