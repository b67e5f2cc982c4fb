"""Memory of one rank's shards by tag. Forward passes may begin while weights are still arriving."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from tasuki.memory import arena as native
from tasuki.trainer.memory import TrainerMemory
from tasuki.trainer.resident_tags import Onload
from tasuki.wire.stages import MemoryTag


class FsdpMemory(TrainerMemory):
    """Pausable memory of one rank's shards. Each FSDP group's forward pass waits, on the GPU, for its own."""

    def freeze(self, parameters: Iterable[Parameter]) -> None:
        """Declares parameters constant for the life of the process: each is copied to the host once, not at every pause."""
        for parameter in parameters:
            local = cast(DTensor, parameter.data).to_local()
            if local.numel():
                native.freeze(local.data_ptr(), local.nbytes)

    def make_gradients(self, parameters: Iterable[Parameter]) -> list[Tensor]:
        """Allocates zero gradients for all parameters, into which FSDP2 then accumulates in place. Returns this rank's shards."""
        made: list[Tensor] = []
        with self.region(MemoryTag.GRADIENTS):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
                made.append(cast(DTensor, parameter.grad).to_local())
        self.clear_at_resume(made)
        return made

    def guard(self, groups: Iterable[FSDPModule]) -> None:
        """See `guard`. Does nothing on a CPU, where copies are synchronous."""
        if self._device.type == "cuda":
            guard(groups, self._onload)


def guard(groups: Iterable[FSDPModule], onload: Onload) -> None:
    """Lets forward passes through `groups` begin before all weights are back. Other readers of weights need `Onload.wait`."""
    for group in groups:
        assert isinstance(group, nn.Module)
        shards = [(shard.data_ptr(), shard.nbytes) for shard in _shards(group) if shard.numel()]
        if shards:
            # FSDP's own hook, which gathers the group, runs afterwards.
            group.register_forward_pre_hook(partial(_await_shard, onload, max(shards)), prepend=True)


def _await_shard(onload: Onload, last: tuple[int, int], group: nn.Module, _inputs: object) -> None:
    """last: address and size of the group's highest shard; lower ones arrive first."""
    address, num_bytes = last
    for stream in (torch.cuda.current_stream(), _gathering_stream(group)) if onload.brings_weights else ():
        if stream is not None:
            onload.wait_on_stream(stream.cuda_stream, address=address, num_bytes=num_bytes)


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
