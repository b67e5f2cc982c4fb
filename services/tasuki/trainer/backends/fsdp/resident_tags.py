"""Parts of a trainer rank's memory that stay during OFFLOAD, and how its weights are published."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tasuki.config.schema import NodeConfig
from tasuki.memory.device_usage import device_usage
from tasuki.planner.layout import Layout
from tasuki.planner.model_shape import read_model_shape
from tasuki.planner.node_plan import node_layout
from tasuki.trainer.mesh import mesh_device
from tasuki.weights.chunk_memory import descriptor_problem
from tasuki.wire.stages import MemoryTag

_log = logging.getLogger(__name__)
TAGS = (MemoryTag.WEIGHTS, MemoryTag.GRADIENTS, MemoryTag.OPTIMIZER)
"""Tags that may be told to leave. Published copies follow the weights."""


@dataclass(frozen=True, slots=True)
class ExportChoice:
    """How weights are published: in place or as a copy, staying during OFFLOAD or not, and with which handles."""

    of_parameters: bool
    stays: bool
    handles: Literal["vmm", "ipc"] = "vmm"

    @classmethod
    def of(cls, config: NodeConfig, layout: Layout, *, rank: int, handles: Literal["vmm", "ipc"] = "vmm") -> ExportChoice:
        """The configured choice; where it is open, the planner's, as in `layout`."""
        stays = layout.export_stays
        if config.residency is not None:
            stays = "export" in config.residency.of_trainer(rank)
        return cls(config.exports_parameters, stays or handles == "ipc", handles)


def choose_handles(mesh: DeviceMesh) -> Literal["vmm", "ipc"]:
    """Descriptors, or legacy CUDA IPC handles where a rank's GPU exports none. Collective."""
    device = mesh_device(mesh)
    problem = descriptor_problem(device)
    passes = torch.tensor(not problem, dtype=torch.int32, device=device)
    dist.all_reduce(passes, op=dist.ReduceOp.MIN, group=mesh.get_group("dp"))
    handles = "vmm" if passes.item() else "ipc"
    _log.info("event=export_handles choice=%s problem=%s", handles, problem)
    return handles


def with_copy_that_stays(config: NodeConfig) -> NodeConfig:
    """The configuration of a rank that publishes by legacy handles, whose memory cannot leave."""
    trainer = config.trainer.model_copy(update={"export": "copy", "export_stays": True})
    return config.model_copy(update={"trainer": trainer})


@dataclass(frozen=True, slots=True)
class ResidentTags:
    """Memory that one rank keeps during OFFLOAD: tags, and whether torch keeps its cache."""

    tags: frozenset[MemoryTag] = frozenset()
    cache: bool = False

    @classmethod
    def of(cls, config: NodeConfig, mesh: DeviceMesh) -> ResidentTags:
        """The planner's decision for the node; no tags if the services were started individually."""
        if config.residency is None:
            return cls()
        names = config.residency.of_trainer(mesh.get_local_rank())
        return cls(frozenset(tag for tag in TAGS if tag in names), "cache" in names)


NONE_RESIDENT = ResidentTags()


def planned_layout(config: NodeConfig, mesh: DeviceMesh) -> Layout:
    """The node's layout for the smallest of the ranks' devices: equal on all ranks. Collective.

    Raises the errors of read_model_shape and node_layout.
    """
    device, rank = mesh_device(mesh), mesh.get_local_rank()
    sizes = torch.tensor([device_usage(name, rank).total_bytes for name in (str(device), "cpu")], device=device)
    dist.all_reduce(sizes, op=dist.ReduceOp.MIN, group=mesh.get_group("dp"))
    gpu_bytes, host_bytes = sizes.tolist()
    return node_layout(config, read_model_shape(config.model.path), gpu_bytes=gpu_bytes, host_bytes=host_bytes)
