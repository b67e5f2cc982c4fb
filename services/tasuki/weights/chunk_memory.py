"""Published weights in chunks of the native library, on a host or a GPU: shared as descriptors, mapped read-only by peers.

Where descriptors do not work, torch's own memory is shared with a legacy cudaIpcMemHandle. Readers can write to it, can access the rest of
the allocation's segment, and must share the PID namespace and /dev/shm.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from tasuki.memory.arena import Arena, buffer_at
from tasuki.memory.granularity import equal_chunks
from tasuki.memory.region import refuse_expandable_segments
from tasuki.memory.shared_chunks import Export, Import, SharedChunk
from tasuki.v1 import weights_pb2
from tasuki.weights.manifest import ALIGNMENT, Entry, Manifest, place
from tasuki.weights.weight_arena import PeerMemory, device_uuid
from tasuki.wire.errors import BadHandle, InternalError, OutOfGpuMemory
from tasuki.wire.stages import MemoryTag


def new_arena(num_bytes: int, *, device: torch.device, tag: MemoryTag = MemoryTag.EXPORT) -> Arena:
    """For one block."""
    most = equal_chunks(num_bytes, device=device.type)
    return Arena(tag, device=str(device), min_chunk_bytes=2 << 20, max_chunk_bytes=most)


def descriptor_problem(device: torch.device) -> str:
    """Why memory of `device` cannot be shared as descriptors, tried with one chunk; empty if it can."""
    arena = new_arena(1, device=device)
    address = arena.allocate(1)
    try:
        export = Export(arena)
        try:
            Import(export.chunks, device=str(device)).close()
        finally:
            export.close()
    except (BadHandle, InternalError) as error:
        return error.message
    finally:
        arena.free(address)
        arena.close()
    return ""


class ExportedChunks:
    """Open descriptors of chunks, which peers see as contiguous, arena after arena."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.sizes: list[int] = []
        self._exports: list[Export] = []
        self._spans: list[tuple[int, int, int]] = []  # address, bytes, total bytes of earlier chunks

    def add(self, arena: Arena, spans: Sequence[tuple[int, int]]) -> None:
        """Adds the chunks of `arena` that contain bytes of `spans` (address, bytes); peers get no others."""
        export = Export(arena)
        self._exports.append(export)
        for chunk in export.chunks:
            start, end = export.base + chunk.offset, export.base + chunk.offset + chunk.num_bytes
            if any(address < end and start < address + num_bytes for address, num_bytes in spans):
                self._spans.append((start, chunk.num_bytes, sum(self.sizes)))
                self.fds.append(chunk.fd)
                self.sizes.append(chunk.num_bytes)
            else:
                os.close(chunk.fd)
        export.chunks = []
        self._spans.sort()

    def offset_of(self, address: int, num_bytes: int) -> int | None:
        """Offset of these bytes for a peer; None unless all are in the chunks."""
        index = bisect_right(self._spans, address, key=lambda span: span[0]) - 1
        if index < 0:
            return None
        start, size, before = self._spans[index]
        offset, end = before + address - start, before + size
        for following in self._spans[index + 1 :]:
            if end >= offset + num_bytes or following[0] != start + size or following[2] != end:
                break
            start, size, before = following
            end += size
        return offset if end >= offset + num_bytes else None

    def close(self) -> None:
        """Idempotent. Peers keep what they have mapped."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []
        for export in self._exports:
            export.close()
        self._exports = []


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """Places of a layout's copies in their block, by index of the entry; `in_place` has the other indices."""

    layout: Manifest
    in_place: frozenset[int]
    entries: dict[int, Entry]
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    """Manifest and tensors of a block at its place. known: the place, and chunks."""

    placed: _Placed
    known: list[object]
    manifest: Manifest
    copies: dict[int, torch.Tensor]


class ChunkMemory:
    """Memory of one rank's published tensors: parameters in place, all others as copies.

    parameters: the arena whose tensors are published in place if they have the published dtype.
    """

    def __init__(self, *, parameters: Arena | None, device: torch.device) -> None:
        self._device, self._parameters = device, parameters
        self._placed: _Placed | None = None
        self._opened: _Opened | None = None
        self._copies: Arena | None = None
        self._block: tuple[int, int] | None = None
        self._exported = ExportedChunks()

    @property
    def kind(self) -> weights_pb2.HandleKind.ValueType:
        return weights_pb2.HANDLE_KIND_CUDA_VMM_FD if self._device.type == "cuda" else weights_pb2.HANDLE_KIND_HOST_MEMFD

    @property
    def copies(self) -> Arena | None:
        """The arena of the copies; None if there are none."""
        return self._copies

    @property
    def fds(self) -> Sequence[int]:
        return self._exported.fds

    def open(self, manifest: Manifest, sources: Sequence[torch.Tensor]) -> tuple[Manifest, list[torch.Tensor]]:
        """Creates descriptors. Returns the manifest with offsets and chunks, and its tensors: parameters themselves or memory for copies.

        sources: published tensors, one per entry. Raises OutOfGpuMemory; WrongPhase while the arenas are paused.
        """
        self.release()
        offsets = self._in_place(manifest.entries, sources)
        placed = self._placed
        if placed is None or placed.layout is not manifest or placed.in_place != offsets.keys():
            copied = [index for index in range(len(manifest.entries)) if index not in offsets]
            entries, num_bytes = place(manifest.entries[index] for index in copied)
            in_order = dict(zip(copied, entries, strict=True))
            placed = self._placed = _Placed(manifest, frozenset(offsets), in_order, num_bytes)
        start = self._map(placed.num_bytes)
        known = [start, offsets, self._block, list(self._exported.sizes)]
        if self._opened is None or self._opened.placed is not placed or self._opened.known != known:
            # Takes milliseconds, so it is kept for memory that leaves and returns.
            self._opened = self._describe(placed, start, offsets, known)
        return self._opened.manifest, [self._opened.copies.get(index, source) for index, source in enumerate(sources)]

    def _map(self, num_bytes: int) -> int:
        """Takes a block of this size and exports its chunks. Returns the block's offset for a peer; 0 without copies."""
        if not num_bytes:
            return 0
        if self._copies is None:
            self._copies = new_arena(num_bytes, device=self._device)
        if self._block is not None and self._block[1] != num_bytes:
            self._copies.free(self._block[0])
            self._block = None
        if self._block is None:
            self._block = self._copies.allocate(num_bytes), num_bytes
        self._exported.add(self._copies, [self._block])
        start = self._exported.offset_of(*self._block)
        assert start is not None, "a block lies in its arena's chunks"
        return start

    def _describe(self, placed: _Placed, start: int, in_place: dict[int, int], known: list[object]) -> _Opened:
        layout, num_bytes = placed.layout, placed.num_bytes
        offsets = in_place | {index: start + entry.arena_offset for index, entry in placed.entries.items()}
        entries = [replace(entry, arena_offset=offsets[index]) for index, entry in enumerate(layout.entries)]
        sizes = tuple(self._exported.sizes)
        uuid = device_uuid(self._device) if self._device.type == "cuda" else ""
        manifest = replace(layout, arena_bytes=sum(sizes), entries=tuple(entries), device_uuid=uuid, chunk_bytes=sizes)
        if not num_bytes:
            return _Opened(placed, known, manifest, {})
        assert self._copies is not None and self._block is not None
        address = self._block[0]
        tensors = tensors_at(address, list(placed.entries.values()), num_bytes, device=self._device)
        return _Opened(placed, known, manifest, dict(zip(placed.entries, tensors, strict=True)))

    def release(self) -> None:
        """Closes every descriptor, so that pausing the arenas frees the memory. Idempotent."""
        self._exported.close()
        self._exported = ExportedChunks()

    def close(self) -> None:
        """Idempotent."""
        self.release()
        self._placed = self._opened = None
        if self._copies is not None:
            if self._block is not None:
                self._copies.free(self._block[0])
            self._copies.close()
            self._copies = self._block = None

    def _in_place(self, entries: Sequence[Entry], sources: Sequence[torch.Tensor]) -> dict[int, int]:
        """Offset of every entry that a peer can read in place."""
        if self._parameters is None:
            return {}
        spans = {
            index: (source.data_ptr(), source.nbytes)
            for index, (entry, source) in enumerate(zip(entries, sources, strict=True))
            if source.dtype is getattr(torch, entry.dtype) and source.is_contiguous()
        }
        if spans:
            self._exported.add(self._parameters, list(spans.values()))
        offsets = {index: self._exported.offset_of(*span) for index, span in spans.items()}
        return {index: offset for index, offset in offsets.items() if offset is not None and offset % ALIGNMENT == 0}


class ImportedChunks(PeerMemory):
    """A peer's chunks, read-only. Raises BadHandle for anything that differs from the manifest."""

    def __init__(self, manifest: Manifest, fds: Sequence[int], *, device: torch.device) -> None:
        self._manifest, self._device = manifest, device
        self._import = self._checked(lambda: Import(self._chunks(fds), device=str(device)))

    def tensors(self, entries: Sequence[Entry] | None = None) -> list[torch.Tensor]:
        """Tensors of the manifest's entries, or of others in the same bytes."""
        # They say they are on `device`, whichever GPU the memory is on: there it is mapped, and there the kernels run.
        places = self._manifest.entries if entries is None else entries
        return tensors_at(self._import.base, places, self._manifest.arena_bytes, device=self._device)

    def release(self) -> None:
        self._import.release()

    def renew(self, fds: Sequence[int]) -> None:
        self._checked(lambda: self._import.renew(self._chunks(fds)))

    def close(self) -> None:
        self._import.close()

    def _chunks(self, fds: Sequence[int]) -> list[SharedChunk]:
        sizes = self._manifest.chunk_bytes
        offsets = list(accumulate(sizes, initial=0))[:-1]
        return [SharedChunk(*described) for described in zip(offsets, sizes, fds, strict=True)]

    def _checked(self, call: Callable[[], Any]) -> Any:
        rank = self._manifest.rank
        try:
            return call()
        except (BadHandle, InternalError) as error:
            raise BadHandle(f"rank {rank} sent memory that {self._device} does not map: {error}", rank=rank) from error


def tensors_at(address: int, entries: Sequence[Entry], num_bytes: int, *, device: torch.device) -> list[torch.Tensor]:
    """The entries in the bytes from `address` on."""
    storage = storage_at(address, num_bytes, device=device)
    return [tensor_in(storage, entry, device=device) for entry in entries]


def storage_at(address: int, num_bytes: int, *, device: torch.device) -> torch.UntypedStorage:
    """The bytes at an address as a storage that does not own them."""
    if device.type == "cuda":
        storage: Any = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
        return storage
    # torch has no read-only tensors; page protection stops writes to a peer's memory.
    return torch.frombuffer(buffer_at(address, num_bytes), dtype=torch.uint8).untyped_storage()


def tensor_in(storage: torch.UntypedStorage, entry: Entry, *, device: torch.device) -> torch.Tensor:
    """The entry as a tensor in an arena's storage."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    flat = torch.empty(0, dtype=dtype, device=device)
    flat.set_(storage, entry.arena_offset // dtype.itemsize, (entry.numel,), (1,))
    return flat.view(entry.sizes)


class IpcAllocation:
    """Memory of one rank's published tensors from torch's allocator. Everything is copied, and stays for the life of the process."""

    kind = weights_pb2.HANDLE_KIND_CUDA_IPC
    fds: Sequence[int] = ()
    copies: Arena | None = None

    def __init__(self, *, device: torch.device) -> None:
        """Raises InvalidArgument if torch's segments are of a kind whose handles need ptrace rights."""
        refuse_expandable_segments()
        self._device = device
        self._opened: tuple[Manifest, list[torch.Tensor]] | None = None

    def open(self, manifest: Manifest, sources: Sequence[torch.Tensor]) -> tuple[Manifest, list[torch.Tensor]]:
        """Same as ChunkMemory.open; the handle is created once."""
        if self._opened is None:
            entries, num_bytes = place(manifest.entries)
            storage = self._allocate(num_bytes).untyped_storage()
            try:
                _, handle, size, offset, counter, counter_offset, _, _ = storage._share_cuda_()
            except RuntimeError as error:
                raise InternalError(f"CUDA provides no IPC handle for this memory: {str(error).splitlines()[0]}") from error
            shared = weights_pb2.IpcMemory(handle=handle, num_bytes=size, offset=offset, process_id=os.getpid())
            shared.counter, shared.counter_offset = counter, counter_offset
            uuid = device_uuid(self._device)
            manifest = replace(manifest, arena_bytes=num_bytes, entries=tuple(entries), device_uuid=uuid, ipc_memory=shared)
            self._opened = manifest, [tensor_in(storage, entry, device=self._device) for entry in entries]
        return self._opened

    def release(self) -> None:
        """Does nothing: a shared handle cannot be revoked."""

    def close(self) -> None:
        self._opened = None

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            free, _ = torch.cuda.mem_get_info(self._device)
            raise OutOfGpuMemory(
                f"{self._device} export: {num_bytes} bytes are needed, {free} are free",
                tag="export",
                needed_bytes=num_bytes,
                free_bytes=free,
                device=str(self._device),
            ) from error


class ImportedAllocation(PeerMemory):
    """A peer's allocation, opened in the context of `device` only."""

    def __init__(self, manifest: Manifest, *, device: torch.device) -> None:
        """Raises BadHandle naming the likely cause."""
        ipc = manifest.ipc_memory
        assert ipc is not None and device.index is not None
        if ipc.process_id == os.getpid():
            raise BadHandle(
                f"trainer rank {manifest.rank} has this process's id, {ipc.process_id}: CUDA cannot open a handle in the process that "
                "created it, or in one with the same id in another PID namespace; share the PID namespace",
                rank=manifest.rank,
            )
        try:
            # The owner has waited for its writes before publishing, so there is no event to wait for.
            self._storage: torch.UntypedStorage | None = torch.UntypedStorage._new_shared_cuda(
                device.index, ipc.handle, ipc.num_bytes, ipc.offset, ipc.counter, ipc.counter_offset, b"", False
            )
        except RuntimeError as error:
            first_line = str(error).splitlines()[0]
            raise BadHandle(
                f"trainer rank {manifest.rank}: {device} cannot open its CUDA IPC handle: {first_line}; has the trainer freed "
                "it or ended, or does another PID namespace or user hide it?",
                rank=manifest.rank,
            ) from error
        self._manifest, self._device = manifest, device

    def tensors(self) -> list[torch.Tensor]:
        assert self._storage is not None
        return [tensor_in(self._storage, entry, device=self._device) for entry in self._manifest.entries]

    def release(self) -> None:
        raise InternalError("memory behind a CUDA IPC handle does not come and go")

    def renew(self, fds: Sequence[int]) -> None:
        raise InternalError("memory behind a CUDA IPC handle does not come and go")

    def close(self) -> None:
        """Unmaps the memory once its last tensor is gone. Idempotent."""
        self._storage = None
