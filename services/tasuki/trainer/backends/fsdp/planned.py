"""The node's plan, as computed by its ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tasuki.config.schema import NodeConfig
from tasuki.memory.device_usage import device_usage
from tasuki.planner.layout import Layout
from tasuki.planner.model_shape import read_model_shape
from tasuki.planner.node_plan import node_layout
from tasuki.trainer.backends.fsdp.mesh import mesh_device


def planned_layout(config: NodeConfig, mesh: DeviceMesh) -> Layout:
    """The node's layout for the smallest of the ranks' devices: equal on all ranks. Collective.

    Raises the errors of read_model_shape and node_layout.
    """
    device, rank = mesh_device(mesh), mesh.get_local_rank()
    sizes = torch.tensor([device_usage(name, rank).total_bytes for name in (str(device), "cpu")], device=device)
    dist.all_reduce(sizes, op=dist.ReduceOp.MIN, group=mesh.get_group("dp"))
    gpu_bytes, host_bytes = sizes.tolist()
    return node_layout(config, read_model_shape(config.model.path), gpu_bytes=gpu_bytes, host_bytes=host_bytes)
