"""Parts of a trainer rank's memory that stay during OFFLOAD, and how its weights are published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh

from tasuki.config.schema import NodeConfig
from tasuki.memory.tags import MemoryTag
from tasuki.planner.layout import Layout

TAGS = (MemoryTag.WEIGHTS, MemoryTag.GRADIENTS, MemoryTag.OPTIMIZER)
"""Tags that may be told to leave. Published copies follow the weights."""


@dataclass(frozen=True, slots=True)
class ExportChoice:
    """How weights are published: in place or as a copy, staying during OFFLOAD or not, and with which handles."""

    of_parameters: bool
    stays: bool
    handles: Literal["vmm", "ipc"] = "vmm"

    @classmethod
    def of(cls, config: NodeConfig, layout: Layout, *, rank: int) -> ExportChoice:
        """The configured choice; where it is open, the planner's, as in `layout`."""
        handles, stays = config.trainer.export_handles, layout.export_stays
        if config.residency is not None:
            stays = "export" in config.residency.of_trainer(rank)
        return cls(config.exports_parameters, stays or handles == "ipc", handles)


@dataclass(frozen=True, slots=True)
class Staying:
    """Memory that one rank keeps during OFFLOAD: tags, and whether torch keeps its cache."""

    tags: frozenset[MemoryTag] = frozenset()
    cache: bool = False
    empties_cache_early: bool = False
    """Whether torch's cache is emptied before the engine wakes; otherwise at OFFLOAD, unless it stays."""

    @classmethod
    def of(cls, config: NodeConfig, mesh: DeviceMesh) -> Staying:
        """The planner's decision for the node; no tags if the services were started individually."""
        is_early = config.trainer.empty_cache_early
        if config.residency is None:
            return cls(empties_cache_early=is_early)
        names = config.residency.of_trainer(mesh.get_local_rank())
        return cls(frozenset(tag for tag in TAGS if tag in names), "cache" in names, is_early and "cache" not in names)


NOTHING_STAYS = Staying()
