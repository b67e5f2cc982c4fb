"""Published weights in torch's own memory, shared with a legacy cudaIpcMemHandle, which torch exports and opens.

The fallback where descriptors do not work. Readers can write, can access the rest of the allocation's segment, and must share the PID
namespace and /dev/shm.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from tasuki.memory.arena import Arena
from tasuki.memory.region_cuda import refuse_expandable_segments
from tasuki.v1 import weights_pb2
from tasuki.weights.chunk_memory import tensor_in
from tasuki.weights.manifest import Manifest, place
from tasuki.weights.weight_arena import PeerMemory, device_uuid
from tasuki.wire.errors import BadHandle, InternalError, OutOfGpuMemory


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
