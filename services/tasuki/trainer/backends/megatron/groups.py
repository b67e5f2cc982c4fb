"""megatron-core's process groups of a node's ranks, and what it needs on a CPU."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, model_parallel_cuda_manual_seed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tasuki.config.trainer_schema import MegatronConfig


@dataclass(frozen=True, slots=True)
class Groups:
    """One rank's groups. megatron-core's modules find the same ones in its global state."""

    tensor: dist.ProcessGroup
    """Neighbours, which share micro-batches and split every layer."""
    data: dist.ProcessGroup
    """Ranks with the same part of the layers."""
    experts: DeviceMesh
    """Neighbours, which share the experts of every layer. Each has its own tokens, also inside a tensor-parallel group."""
    same_experts: dist.ProcessGroup
    """Ranks with the same experts."""
    device: torch.device

    @classmethod
    def join(cls, config: MegatronConfig, *, device: torch.device, timeout_s: float, seed: int) -> "Groups":
        """Collective, over all ranks of the process group."""
        minutes = math.ceil(timeout_s / 60)
        parallel_state.initialize_model_parallel(
            config.tensor_parallel,
            expert_model_parallel_size=config.expert_parallel,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=minutes,
        )
        if device.type == "cuda":
            model_parallel_cuda_manual_seed(seed)
        tensor, data, experts, same_experts = (
            cast(dist.ProcessGroup, group)
            for group in (
                parallel_state.get_tensor_model_parallel_group(),
                parallel_state.get_data_parallel_group(),
                parallel_state.get_expert_model_parallel_group(),
                parallel_state.get_expert_data_parallel_group(),
            )
        )
        mesh = DeviceMesh.from_group(experts, device.type, mesh_dim_names=("dp",))
        return cls(tensor, data, mesh, same_experts, device)

    def leave(self) -> None:
        parallel_state.destroy_model_parallel()

    def gather_tensor(self, mine: Tensor) -> Tensor:
        """[...] -> [R, ...] over the tensor-parallel ranks."""
        everyone = mine.new_empty((self.tensor.size(), *mine.shape))
        dist.all_gather_into_tensor(everyone.flatten(0, 1), mine.contiguous(), group=self.tensor)
        return everyone

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Runs megatron-core's layers forward or backward.

        It allocates on the current GPU, and forks a GPU's random state around its layers, also where there is none.
        """
        if self.device.type == "cuda":
            yield
            return
        names: list[tuple[Any, str, Any]] = [
            (torch.cuda, "current_device", lambda: "cpu"),
            (CudaRNGStatesTracker, "fork", lambda *_: nullcontext()),
        ]
        real = [(owner, name, getattr(owner, name)) for owner, name, _ in names]
        try:
            for owner, name, other in names:
                setattr(owner, name, other)
            yield
        finally:
            for owner, name, value in real:
                setattr(owner, name, value)
