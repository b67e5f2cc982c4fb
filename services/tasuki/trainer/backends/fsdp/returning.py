"""Content that comes back from the host behind LOAD_TRAINER: each FSDP group's forward pass waits, on the GPU, for its own shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tasuki.memory.allocator import NativeAllocator, Transfer
from tasuki.memory.tags import MemoryTag
from tasuki.wire.errors import TasukiError

TAGS = (MemoryTag.WEIGHTS, MemoryTag.OPTIMIZER)
"""What is copied back, in this order: training begins with the weights."""


class Returning:
    """Tags of one rank that are mapped, and whose content is on its way."""

    def __init__(self, allocator: NativeAllocator) -> None:
        self._allocator = allocator
        self._transfers: dict[MemoryTag, Transfer] = {}

    def begin(self, tags: Sequence[MemoryTag]) -> None:
        """Maps those of TAGS and starts their copies. Raises OutOfGpuMemory with all of them asleep."""
        try:
            for tag in TAGS:
                if tag in tags:
                    self._transfers[tag] = self._allocator.resume_async([tag])
        except TasukiError:
            begun = list(self._transfers)
            self.wait()
            self._allocator.pause(begun)
            raise

    def wait(self, tags: Iterable[MemoryTag] = TAGS) -> None:
        """Returns when `tags` have their content."""
        for tag in tags:
            if (transfer := self._transfers.pop(tag, None)) is not None:
                transfer.wait()

    def guard(self, groups: Iterable[FSDPModule]) -> None:
        """Lets forward passes through `groups` begin before all weights are back. Everything else that reads weights needs `wait`."""
        for group in groups:
            assert isinstance(group, nn.Module)
            shards = [(shard.data_ptr(), shard.nbytes) for shard in _shards(group) if shard.numel()]
            if shards:
                # FSDP's own hook, which gathers the group, comes after it.
                group.register_forward_pre_hook(partial(self._await_shard, max(shards)), prepend=True)

    def _await_shard(self, last: tuple[int, int], group: nn.Module, _inputs: object) -> None:
        """last: address and bytes of the group's highest shard; lower ones come before it."""
        transfer = self._transfers.get(MemoryTag.WEIGHTS)
        if transfer is None:
            return
        address, num_bytes = last
        for stream in (torch.cuda.current_stream(), _gathering_stream(group)):
            if stream is not None:
                transfer.wait_on_stream(stream.cuda_stream, address=address, num_bytes=num_bytes)


def _shards(group: nn.Module) -> Iterator[Tensor]:
    """Of the parameters that are the group's, and no nested group's."""
    for parameter in group.parameters(recurse=False):
        assert isinstance(parameter, DTensor)
        yield parameter.to_local()
    for child in group.children():
        if not isinstance(child, FSDPModule):
            yield from _shards(child)


def _gathering_stream(group: nn.Module) -> torch.cuda.Stream | None:
    """On which FSDP2 reads shards; None before its first pass, whose streams wait for the current one."""
    assert isinstance(group, FSDPModule)
    return getattr(group._get_fsdp_state()._comm_ctx, "all_gather_copy_in_stream", None)
