"""What of a trainer rank's memory stays over OFFLOAD, and how its weights are published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh

from tasuki.config.schema import NodeConfig
from tasuki.memory.tags import MemoryTag
from tasuki.planner.layout import Layout

TAGS = (MemoryTag.WEIGHTS, MemoryTag.GRADIENTS, MemoryTag.OPTIMIZER)
"""What is told to leave. The copies that are published follow the weights."""


@dataclass(frozen=True, slots=True)
class ExportChoice:
    """How weights are published: the parameters themselves or a copy, staying over OFFLOAD or not, and under which handles."""

    of_parameters: bool
    stays: bool
    handles: Literal["vmm", "ipc"] = "vmm"

    @classmethod
    def of(cls, config: NodeConfig, layout: Layout, *, rank: int) -> ExportChoice:
        """The configuration's, and where that leaves it open the planner's, which `layout` says."""
        handles, stays = config.trainer.export_handles, layout.export_stays
        if config.residency is not None:
            stays = "export" in config.residency.of_trainer(rank)
        return cls(config.exports_parameters, stays or handles == "ipc", handles)


@dataclass(frozen=True, slots=True)
class Staying:
    """What one rank keeps over OFFLOAD: tags, and whether torch keeps its cache."""

    tags: frozenset[MemoryTag] = frozenset()
    cache: bool = False
    leaves_later: bool = False
    """Whether what is copied to the host goes behind the answer: rollout's KV cache grows into its room."""

    @classmethod
    def of(cls, config: NodeConfig, mesh: DeviceMesh) -> Staying:
        """As the planner decided for the node; no tag for services that were started one by one."""
        later = config.rollout.kv_growth
        if config.residency is None:
            return cls(leaves_later=later)
        names = config.residency.of_trainer(mesh.get_local_rank())
        return cls(frozenset(tag for tag in TAGS if tag in names), "cache" in names, later)


NOTHING_STAYS = Staying()
