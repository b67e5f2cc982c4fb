"""Allocator that returns memory to the system: one arena per tag, filled in a `region`, paused and resumed by tag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from tasuki.memory.arena import Arena, ArenaState, ArenaUsage, Keep
from tasuki.memory.library import call, numbers
from tasuki.memory.region_cpu import Placing
from tasuki.v1.types_pb2 import TagUsage
from tasuki.wire.errors import InvalidArgument, OutOfGpuMemory, WrongPhase
from tasuki.wire.stages import MemoryTag

if TYPE_CHECKING:
    from tasuki.memory.region_cuda import CudaRegions

_CPU_MIN_CHUNK_BYTES, _CPU_MAX_CHUNK_BYTES = 2 * 2**20, 64 * 2**20


class NativeAllocator:
    """Memory of this process on one device, by tag, over csrc. Pause and resume are idempotent and all-or-nothing.

    Addresses never change, so exports and CUDA graphs stay valid.
    """

    def __init__(
        self,
        *,
        tags: Sequence[MemoryTag],
        device: str,
        keep: Mapping[MemoryTag, Keep] | None = None,
        min_chunk_bytes: int = 0,
        max_chunk_bytes: int = 0,
    ) -> None:
        """`keep`: parts that a pause of each tag keeps; none by default.

        Chunk sizes: 0 is the default, on a GPU the measured 64 MiB to 1 GiB, on a CPU 2 to 64 MiB.
        """
        self._device = device
        if device == "cpu":
            # On a CPU a mapping costs the same at any size, and models are small.
            min_chunk_bytes, max_chunk_bytes = min_chunk_bytes or _CPU_MIN_CHUNK_BYTES, max_chunk_bytes or _CPU_MAX_CHUNK_BYTES
        self._arenas = {
            tag: Arena(tag, device=device, min_chunk_bytes=min_chunk_bytes, max_chunk_bytes=max_chunk_bytes) for tag in tags
        }
        self._adopted: dict[MemoryTag, Arena] = {}
        for tag, policy in (keep or {}).items():
            self.arena(tag).set_policy(policy)
        self._cuda: CudaRegions | None = None
        if device != "cpu":
            from tasuki.memory.region_cuda import CudaRegions

            self._cuda = CudaRegions(list(self._arenas.values()), device=device)

    @property
    def device(self) -> str:
        return self._device

    @property
    def tags(self) -> tuple[MemoryTag, ...]:
        return (*self._arenas, *self._adopted)

    def arena(self, tag: MemoryTag) -> Arena:
        if tag not in self.tags:
            raise InvalidArgument("tags", f"{tag} is no tag of this process; it has {', '.join(self.tags)}")
        return self._arenas[tag] if tag in self._arenas else self._adopted[tag]

    def adopt(self, tag: MemoryTag, arena: Arena) -> None:
        """Pauses, resumes and counts this arena as `tag`. The caller still fills and closes it."""
        assert tag not in self.tags
        self._adopted[tag] = arena

    @contextmanager
    def region(self, tag: MemoryTag) -> Iterator[None]:
        """Allocates tensors that this thread makes in the block in `tag`. Raises WrongPhase while the tag sleeps."""
        arena = self.arena(tag)
        if arena.usage().state is ArenaState.PAUSED:
            raise WrongPhase(f"{tag} is asleep: resume it before making tensors in it", needed=f"resume {tag}")
        with self._cuda.region(tag) if self._cuda is not None else Placing(arena):
            yield

    def pause(self, tags: Sequence[MemoryTag]) -> int:
        """Returns the bytes given back to the system; 0 for tags already asleep."""
        arenas = [self.arena(tag) for tag in tags]
        (num_bytes,) = _call_for(arenas)("pause", _ids(arenas), len(arenas), num_outs=1)
        return num_bytes

    def resume(self, tags: Sequence[MemoryTag]) -> int:
        """Returns the bytes mapped. Raises OutOfGpuMemory with every tag still asleep."""
        return self._resume("resume", [self.arena(tag) for tag in tags])

    def resume_async(self, tags: Sequence[MemoryTag]) -> Transfer:
        """Maps at once; kept content is back after the transfer's `wait`, or on a stream after its `wait_on_stream`."""
        arenas = [self.arena(tag) for tag in tags]
        return Transfer(self._resume("resume_async", arenas), arenas)

    def blocks(self, tag: MemoryTag) -> list[tuple[int, int]]:
        """Address and bytes of each block in the tag's region: the content that a pause discards or keeps."""
        return self.arena(tag).buffers() if self._cuda is None else self._cuda.blocks(tag)

    def usage(self) -> list[TagUsage]:
        return [_tag_usage(tag, self._device, arena.usage()) for tag, arena in (self._arenas | self._adopted).items()]

    def close(self) -> None:
        """Releases all addresses. Raises Busy while a tensor in a region lives."""
        if self._cuda is not None:
            self._cuda.close()
        for arena in self._arenas.values():
            arena.close()

    def _resume(self, name: str, arenas: Sequence[Arena]) -> int:
        """Resumes, and empties torch's cache if memory is short: the driver does not count cached blocks as free, and emptying is slow."""
        resume = partial(_call_for(arenas), name, _ids(arenas), len(arenas), num_outs=1)
        try:
            (number,) = resume()
        except OutOfGpuMemory:
            if self._cuda is None:
                raise
            self._cuda.empty_cache()
            (number,) = resume()
        return number

    def cuda_regions(self) -> CudaRegions:
        if self._cuda is None:
            raise InvalidArgument("device", f"{self._device} has no CUDA memory pools")
        return self._cuda


class Transfer:
    """A resume whose copies are in progress. `wait` is called once."""

    def __init__(self, ticket: int, arenas: Sequence[Arena]) -> None:
        self._ticket = ticket
        self._call = _call_for(arenas)

    def wait(self) -> int:
        """Ends the transfer. Returns the bytes mapped; a failure leaves every arena as it was."""
        (num_bytes,) = self._call("wait", self._ticket, num_outs=1)
        return num_bytes

    def wait_on_stream(self, stream: int, *, address: int = 0, num_bytes: int = 0) -> None:
        """Makes later work on the CUDA stream wait until the content is back.

        With `num_bytes`, only until those at `address` are back: content returns by rising addresses.
        """
        self._call("stream_after", self._ticket, stream, address, num_bytes)


def _call_for(arenas: Sequence[Arena]) -> partial[list[int]]:
    return partial(call, device=arenas[0].device if arenas else "", tags=[arena.tag for arena in arenas])


def _ids(arenas: Sequence[Arena]) -> Any:
    return numbers([arena.id for arena in arenas])


def _tag_usage(tag: MemoryTag, device: str, usage: ArenaUsage) -> TagUsage:
    return TagUsage(
        tag=tag.number,
        device=device,
        mapped_bytes=usage.mapped_bytes,
        total_bytes=usage.total_bytes,
        is_paused=usage.state is ArenaState.PAUSED,
        kept_bytes=usage.kept_bytes,
        host_copy_bytes=usage.host_copy_bytes,
    )
