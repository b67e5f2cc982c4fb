"""Parts of a trainer rank's memory that stay during OFFLOAD, how its weights are published, and how content returns.

It returns after LOAD_TRAINER: each FSDP group's forward pass waits, on the GPU, for its own shards.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tasuki.config.choices import Choices
from tasuki.config.schema import NodeConfig
from tasuki.memory.arena import NativeAllocator, Transfer
from tasuki.trainer.replicas import mesh_device
from tasuki.weights.chunk_memory import descriptor_problem
from tasuki.wire.errors import TasukiError
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
    def of(cls, config: NodeConfig, choices: Choices, *, rank: int, handles: Literal["vmm", "ipc"] = "vmm") -> "ExportChoice":
        """The planner's choice. Memory that passes by legacy handles is a copy, and cannot leave."""
        is_ipc = handles == "ipc"
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
    """Memory that one rank keeps during OFFLOAD: tags, and whether torch keeps its cache."""

    tags: frozenset[MemoryTag] = frozenset()
    cache: bool = False

    @classmethod
    def of(cls, choices: Choices, *, rank: int) -> "ResidentTags":
        """The planner's choice for one rank."""
        names = choices.of_trainer(rank)
        return cls(frozenset(tag for tag in TAGS if tag in names), "cache" in names)


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

    def guard(self, groups: Iterable[FSDPModule]) -> None:
        """Lets forward passes through `groups` begin before all weights are back. Other readers of weights need `wait`."""
        for group in groups:
            assert isinstance(group, nn.Module)
            shards = [(shard.data_ptr(), shard.nbytes) for shard in _shards(group) if shard.numel()]
            if shards:
                # FSDP's own hook, which gathers the group, runs afterwards.
                group.register_forward_pre_hook(partial(self._await_shard, max(shards)), prepend=True)

    def _await_shard(self, last: tuple[int, int], group: nn.Module, _inputs: object) -> None:
        """last: address and size of the group's highest shard; lower ones arrive first."""
        transfer = self._transfers.get(MemoryTag.WEIGHTS)
        if transfer is None:
            return
        address, num_bytes = last
        for stream in (torch.cuda.current_stream(), _gathering_stream(group)):
            if stream is not None:
                transfer.wait_on_stream(stream.cuda_stream, address=address, num_bytes=num_bytes)


def _shards(group: nn.Module) -> Iterator[Tensor]:
    """Parameters of the group, without those of nested groups."""
    for parameter in group.parameters(recurse=False):
        assert isinstance(parameter, DTensor)
        yield parameter.to_local()
    for child in group.children():
        if not isinstance(child, FSDPModule):
            yield from _shards(child)


def _gathering_stream(group: nn.Module) -> torch.cuda.Stream | None:
    """Stream on which FSDP2 reads shards; None before its first pass, whose streams wait for the current one."""
    assert isinstance(group, FSDPModule)
    return getattr(group._get_fsdp_state()._comm_ctx, "all_gather_copy_in_stream", None)
