"""Arenas on a GPU: chunks of the native library, handed out as descriptors, with their header in a sealed memfd of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from tasuki.memory.arena import Access, Arena, Import, SharedChunk
from tasuki.transport.header import ArenaState, Header, create_sealed, map_sealed
from tasuki.transport.manifest import Manifest, check, header_bytes
from tasuki.transport.weight_arena import WeightArena
from tasuki.v1 import weights_pb2
from tasuki.wire.errors import BadHandle, InternalError

_KIND = weights_pb2.HANDLE_KIND_CUDA_VMM_FD
_TAG = "weight_export"
_MAX_CHUNK_BYTES = 1 << 30
_GRANULE_BYTES = 2 << 20


def device_uuid(device: torch.device) -> str:
    """As CUDA names the GPU, in every process and container."""
    return str(torch.cuda.get_device_properties(device).uuid)


def create_arena(manifest: Manifest, *, device: torch.device) -> WeightArena:
    """A new arena of the manifest's size on `device`; its manifest names the GPU and the chunks. Raises OutOfGpuMemory."""
    chunk_bytes = _chunk_bytes(manifest.arena_bytes)
    memory = Arena(_TAG, device=f"cuda:{device.index}", min_chunk_bytes=_GRANULE_BYTES, max_chunk_bytes=chunk_bytes)
    address = memory.allocate(manifest.arena_bytes)
    export = memory.export(Access.READ_ONLY)
    assert export.base == address, "the first block starts the arena"
    assert [chunk.offset for chunk in export.chunks] == _offsets([chunk.num_bytes for chunk in export.chunks])
    manifest = replace(manifest, device_uuid=device_uuid(device), chunk_bytes=tuple(chunk.num_bytes for chunk in export.chunks))
    check(manifest)
    mapping, header_fd = create_sealed(f"tasuki-weights-{manifest.rank}", manifest.header_offset + _header_bytes(manifest))
    header = Header(manifest, mapping)
    header.write_state(ArenaState.EMPTY)

    def release() -> None:
        export.chunks = []  # the arena has closed their descriptors
        export.close()
        memory.free(address)
        memory.close()

    fds = [header_fd, *(chunk.fd for chunk in export.chunks)]
    tensors = _tensors(manifest, address, device=device)
    return WeightArena(manifest, kind=_KIND, header=header, tensors=tensors, fds=fds, release=release)


def map_header(manifest: Manifest, fds: Sequence[int]) -> WeightArena:
    """A peer's arena without its memory, for a process that uses no GPU. Raises BadHandle."""
    header = _map_header(manifest, fds)
    return WeightArena(manifest, kind=_KIND, header=header, tensors=(), fds=(), release=lambda: None)


def map_arena(manifest: Manifest, fds: Sequence[int], *, device: torch.device) -> WeightArena:
    """A peer's arena, read-only, for kernels on `device`. Raises BadHandle when it is on a GPU that `device` cannot read."""
    header = _map_header(manifest, fds)
    _check_reach(manifest, device)
    sizes = manifest.chunk_bytes
    chunks = [SharedChunk(*one) for one in zip(_offsets(sizes), sizes, fds[1:], strict=True)]
    try:
        memory = Import(chunks, device=f"cuda:{device.index}", access=Access.READ_ONLY)
    except InternalError as error:
        raise BadHandle(f"rank {manifest.rank} sent memory that {device} does not map: {error}", rank=manifest.rank) from error
    # The tensors say they are on `device`, whichever GPU the memory is on: there it is mapped, and there the kernels run.
    tensors = _tensors(manifest, memory.base, device=device)
    return WeightArena(manifest, kind=_KIND, header=header, tensors=tensors, fds=(), release=memory.close)


def _map_header(manifest: Manifest, fds: Sequence[int]) -> Header:
    if len(fds) != 1 + len(manifest.chunk_bytes):
        raise BadHandle(
            f"rank {manifest.rank} sent {len(fds)} descriptors for a header and {len(manifest.chunk_bytes)} chunks",
            rank=manifest.rank,
        )
    num_bytes = manifest.header_offset + _header_bytes(manifest)
    return Header(manifest, map_sealed(fds[0], num_bytes, rank=manifest.rank))


def _check_reach(manifest: Manifest, device: torch.device) -> None:
    visible = {device_uuid(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    owner = visible.get(manifest.device_uuid)
    if owner is None or (owner != device.index and not torch.cuda.can_device_access_peer(device, owner)):
        raise BadHandle(
            f"trainer rank {manifest.rank} publishes on GPU {manifest.device_uuid}, which {device} ({device_uuid(device)}) cannot "
            f"read; visible here: {', '.join(visible)}",
            rank=manifest.rank,
            device_uuid=manifest.device_uuid,
        )


def _chunk_bytes(num_bytes: int) -> int:
    """Of equal chunks that leave little over, each a descriptor, none above the size that is quick to map."""
    num_chunks = -(-num_bytes // _MAX_CHUNK_BYTES)
    return -(-num_bytes // (num_chunks * _GRANULE_BYTES)) * _GRANULE_BYTES


def _header_bytes(manifest: Manifest) -> int:
    return header_bytes(len(manifest.entries))


def _offsets(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))[:-1]


def _tensors(manifest: Manifest, address: int, *, device: torch.device) -> list[torch.Tensor]:
    storage = torch._C._construct_storage_from_data_pointer(address, device, manifest.arena_bytes)
    tensors: list[torch.Tensor] = []
    for entry in manifest.entries:
        dtype: torch.dtype = getattr(torch, entry.dtype)
        flat = torch.empty(0, dtype=dtype, device=device)
        flat.set_(storage, entry.offset // dtype.itemsize, (entry.numel,), (1,))
        tensors.append(flat.view(entry.shape))
    return tensors
