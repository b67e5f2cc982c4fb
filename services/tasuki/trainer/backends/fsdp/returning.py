"""Content restored after LOAD_TRAINER returns: each FSDP group's forward pass waits, on the GPU, for its own shards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tasuki.memory.allocator import NativeAllocator, Transfer
from tasuki.memory.tags import MemoryTag, Movement, MovementKind
from tasuki.wire.errors import TasukiError

TAGS = (MemoryTag.WEIGHTS, MemoryTag.OPTIMIZER)
"""Tags restored, in this order: training starts with the weights."""


@dataclass(slots=True)
class _Return:
    """One tag's. started: on the monotonic clock. is_told: whether its end is to be reported."""

    transfer: Transfer
    num_bytes: int
    started: float
    is_arriving: bool = True
    is_told: bool = False


class Returning:
    """Tags of one rank that are mapped while their content is being restored.

    reached: called with a failpoint's name when a tag's content is there.
    """

    def __init__(self, allocator: NativeAllocator, *, reached: Callable[[str], None] = lambda _: None) -> None:
        self._allocator, self._reached = allocator, reached
        self._returns: dict[MemoryTag, _Return] = {}
        self._ended: list[Movement] = []
        self._lock = threading.RLock()
        """Tags that return early do so in a thread of Leaving, while this one answers."""

    def begin(self, tags: Sequence[MemoryTag], *, is_early: bool = False) -> None:
        """Maps those of `tags` that are in TAGS and starts their copies. Raises OutOfGpuMemory with all of them paused.

        is_early: before LOAD_TRAINER, so the next answer reports them, also if they have ended by then.
        """
        begun: list[MemoryTag] = []
        with self._lock:
            try:
                for tag in TAGS:
                    if tag in tags:
                        started, transfer = time.monotonic(), self._allocator.resume_async([tag])
                        num_bytes = self._allocator.arena(tag).usage().mapped_bytes
                        self._returns[tag] = _Return(transfer, num_bytes, started, is_told=is_early)
                        begun.append(tag)
            except TasukiError:
                self.wait(begun)
                self._allocator.pause(begun)
                raise

    def cancel(self, tag: MemoryTag) -> bool:
        """Waits until the content of `tag` has arrived and forgets its return. Returns whether it was returning, or has returned."""
        with self._lock:
            one = self._returns.pop(tag, None)
            if one is None:
                return False
            self._ended = [ended for ended in self._ended if ended.tag is not tag]
            one.transfer.wait()
            return True

    def wait(self, tags: Iterable[MemoryTag] = TAGS) -> None:
        """Waits until `tags` have their content."""
        with self._lock:
            for tag in tags:
                if (one := self._returns.pop(tag, None)) is not None:
                    arrived_bytes = 0
                    try:
                        arrived_bytes = one.transfer.wait()
                        self._reached("return.done")
                    finally:
                        self._end(tag, one, arrived_bytes)

    def pending(self) -> dict[MemoryTag, int]:
        """Bytes of tags whose content is still arriving. On a CPU it is there once `begin` returns."""
        with self._lock:
            for tag, one in self._returns.items():
                if one.transfer.is_done:
                    self._end(tag, one, one.num_bytes)
            return {tag: one.num_bytes for tag, one in self._returns.items() if one.is_arriving}

    def take_begun(self) -> tuple[Movement, ...]:
        """Movements that continue from now on, for the answer to report."""
        pending = self.pending()
        for tag in pending:
            self._returns[tag].is_told = True
        return tuple(Movement(MovementKind.RETURN, tag, num_bytes) for tag, num_bytes in pending.items())

    def take_ended(self) -> tuple[Movement, ...]:
        """Movements reported earlier that have ended since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def _end(self, tag: MemoryTag, one: _Return, num_bytes: int) -> None:
        if one.is_arriving and one.is_told:
            seconds = time.monotonic() - one.started
            self._ended.append(Movement(MovementKind.RETURN, tag, num_bytes, seconds, time.time()))
        one.is_arriving = False

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
        returning = self._returns.get(MemoryTag.WEIGHTS)
        if returning is None:
            return
        address, num_bytes = last
        for stream in (torch.cuda.current_stream(), _gathering_stream(group)):
            if stream is not None:
                returning.transfer.wait_on_stream(stream.cuda_stream, address=address, num_bytes=num_bytes)


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
