"""Parts of a trainer rank's memory that stay during OFFLOAD, how its weights are published, and how content returns.

It returns after LOAD_TRAINER, beside the first passes.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tasuki.config.choices import Choices
from tasuki.config.schema import NodeConfig
from tasuki.memory.arena import NativeAllocator, Transfer
from tasuki.trainer.replicas import mesh_device
from tasuki.weights.chunk_memory import descriptor_problem
from tasuki.wire.errors import InvalidArgument, TasukiError
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
    merges: bool = False
    """Whether adapters are merged into the published parameters."""

    @classmethod
    def of(cls, config: NodeConfig, choices: Choices, *, rank: int, handles: Literal["vmm", "ipc"] = "vmm") -> "ExportChoice":
        """The planner's choice. Memory that passes by legacy handles is a copy, and cannot leave.

        Raises InvalidArgument if adapters are to be merged in place nevertheless.
        """
        is_ipc = handles == "ipc"
        if choices.merges_in_place:
            if is_ipc:
                problem = 'is "merged": no copy fits, and this GPU exports no descriptors of the base; raise trainer.num_ranks'
                raise InvalidArgument("rollout.lora", problem)
            return cls(True, False, merges=True)
        return cls(config.exports_parameters and not is_ipc, is_ipc or "export" in choices.of_trainer(rank), handles)


def choose_handles(mesh: DeviceMesh) -> Literal["vmm", "ipc"]:
    """Descriptors, or legacy CUDA IPC handles where a rank's GPU exports none. Collective."""
    device = mesh_device(mesh)
    problem = descriptor_problem(device)
    passes = torch.tensor(not problem, dtype=torch.int32, device=device)
    dist.all_reduce(passes, op=dist.ReduceOp.MIN, group=mesh.get_group("dp"))
    handles = "vmm" if passes.item() else "ipc"
    _log.info("event=export_handles choice=%s problem=%s", handles, problem)
    return handles


@dataclass(frozen=True, slots=True)
class ResidentTags:
    """Memory that one rank keeps during OFFLOAD: tags, and whether torch keeps its cache.

    later_bytes: as in Choices.
    """

    tags: frozenset[MemoryTag] = frozenset()
    cache: bool = False
    later_bytes: int = 0

    @classmethod
    def of(cls, choices: Choices, *, rank: int) -> "ResidentTags":
        """The planner's choice for one rank."""
        names = choices.of_trainer(rank)
        return cls(frozenset(tag for tag in TAGS if tag in names), "cache" in names, choices.later_bytes)


NONE_RESIDENT = ResidentTags()


RESTORED = (MemoryTag.WEIGHTS, MemoryTag.OPTIMIZER)
"""Tags restored, in this order: training starts with the weights."""


class Onload:
    """Tags of one rank that are mapped while their content is being restored."""

    def __init__(self, allocator: NativeAllocator) -> None:
        self._allocator = allocator
        self._transfers: dict[MemoryTag, Transfer] = {}

    def begin(self, tags: Sequence[MemoryTag]) -> None:
        """Maps those of `tags` that are in RESTORED and starts their copies. Raises OutOfGpuMemory with all of them paused."""
        begun: list[MemoryTag] = []
        try:
            for tag in RESTORED:
                if tag in tags:
                    self._transfers[tag] = self._allocator.resume_async([tag])
                    begun.append(tag)
        except TasukiError:
            self.wait(begun)
            self._allocator.pause(begun)
            raise

    def wait(self, tags: Iterable[MemoryTag] = RESTORED) -> None:
        """Waits until `tags` have their content."""
        for tag in tags:
            if (transfer := self._transfers.pop(tag, None)) is not None:
                transfer.wait()

    @property
    def brings_weights(self) -> bool:
        return MemoryTag.WEIGHTS in self._transfers

    def wait_on_stream(self, stream: int, *, address: int, num_bytes: int) -> None:
        """Lets a CUDA stream wait for these weights and all below them, which arrive first."""
        self._transfers[MemoryTag.WEIGHTS].wait_on_stream(stream, address=address, num_bytes=num_bytes)
