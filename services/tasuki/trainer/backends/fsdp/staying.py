"""Parts of a trainer rank's memory that stay during OFFLOAD, and how its weights are published."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tasuki.config.schema import NodeConfig
from tasuki.planner.layout import Layout
from tasuki.trainer.backends.fsdp.mesh import mesh_device
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
class Staying:
    """Memory that one rank keeps during OFFLOAD: tags, and whether torch keeps its cache."""

    tags: frozenset[MemoryTag] = frozenset()
    cache: bool = False

    @classmethod
    def of(cls, config: NodeConfig, mesh: DeviceMesh) -> Staying:
        """The planner's decision for the node; no tags if the services were started individually."""
        if config.residency is None:
            return cls()
        names = config.residency.of_trainer(mesh.get_local_rank())
        return cls(frozenset(tag for tag in TAGS if tag in names), "cache" in names)


NOTHING_STAYS = Staying()
