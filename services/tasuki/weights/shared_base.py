"""The model below adapters, or one rank's part of it, in one copy that trainer and engine read: chunks that both map read-only.

Nobody owns it: whoever has mapped it hands its descriptors on, so it lives for as long as one of the two does.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from google.protobuf.message import DecodeError

from tasuki.v1 import weights_pb2
from tasuki.weights.chunk_memory import ExportedChunks, ImportedChunks, new_arena, tensors_at
from tasuki.weights.fd_socket import FdServer, close_all, fetch
from tasuki.weights.manifest import Entry, Manifest, check, from_proto, place, to_proto
from tasuki.weights.weight_arena import device_uuid
from tasuki.wire.errors import BadHandle
from tasuki.wire.stages import MemoryTag

# A part of a fused parameter begins wherever the part before it ends.
_ALIGNMENT = 1
_POLL_S = 0.1
_FETCH_TIMEOUT_S = 10.0


class SharedBase:
    """A model as this process reads it. A write to its tensors ends the process on a CPU, and is refused on a GPU."""

    def __init__(self, manifest: Manifest, fds: Sequence[int], *, device: torch.device) -> None:
        """Takes the descriptors over. Raises BadHandle for memory that is not what the manifest says."""
        self.manifest, self._fds = manifest, list(fds)
        self._server: FdServer | None = None
        try:
            self._chunks = ImportedChunks(manifest, self._fds, device=device)
        except BaseException:
            close_all(self._fds)
            raise

    @property
    def num_bytes(self) -> int:
        """Physical memory, whoever else has it mapped."""
        return sum(self.manifest.chunk_bytes)

    def tensors(self) -> dict[str, tuple[Entry, torch.Tensor]]:
        """The checkpoint's tensors by name."""
        pairs = zip(self.manifest.entries, self._chunks.tensors(), strict=True)
        return {entry.name: (entry, tensor) for entry, tensor in pairs}

    def tensors_at(self, entries: Sequence[Entry]) -> list[torch.Tensor]:
        """Others in the same bytes."""
        return self._chunks.tensors(entries)

    def hand_out(self, path: Path) -> None:
        """From now on to processes of this user."""
        self._server = FdServer(path, message=to_proto(self.manifest).SerializeToString(), fds=self._fds)

    def close(self) -> None:
        """Hands nothing out any more; what is mapped stays until the process ends. Idempotent."""
        if self._server is not None:
            self._server.close()


class WritableBase:
    """A base while it is loaded. entries: what is made, each whole, in this order."""

    def __init__(self, entries: Sequence[Entry], *, device: torch.device) -> None:
        """Raises OutOfGpuMemory."""
        self.entries, self._num_bytes = place(entries)
        self._device = device
        self._arena = new_arena(self._num_bytes, device=device, tag=MemoryTag.WEIGHTS)
        self._address = self._arena.allocate(self._num_bytes)

    def tensors(self) -> list[torch.Tensor]:
        """Tensors of the entries, to be filled. Must not be used after `close`."""
        return tensors_at(self._address, self.entries, self._num_bytes, device=self._device)

    def publish(self, entries: Sequence[Entry], *, rank: int, num_ranks: int) -> SharedBase:
        """The same bytes, read-only, once all that was written has arrived. entries: what readers find in them, of this rank."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        exported = ExportedChunks()
        exported.add(self._arena, [(self._address, self._num_bytes)])
        try:
            assert exported.offset_of(self._address, self._num_bytes) == 0, "a new arena's first block is at its beginning"
            sizes = tuple(exported.sizes)
            uuid = device_uuid(self._device) if self._device.type == "cuda" else ""
            manifest = Manifest(rank, num_ranks, sum(sizes), tuple(entries), uuid, sizes)
            check(manifest, alignment=_ALIGNMENT)
            return SharedBase(manifest, [os.dup(fd) for fd in exported.fds], device=self._device)
        finally:
            exported.close()

    def close(self) -> None:
        """Ends the only mapping that can be written to. What was published stays."""
        self._arena.free(self._address)
        self._arena.close()


def find_base(path: Path, *, device: torch.device) -> SharedBase | None:
    """The base that the process behind `path` hands out; None when there is none. Raises BadHandle for one that must not be used."""
    try:
        message, fds = fetch(path, timeout_s=_FETCH_TIMEOUT_S)
    except BadHandle:
        return None
    try:
        manifest = from_proto(weights_pb2.WeightManifest.FromString(message), alignment=_ALIGNMENT)
        check(manifest, alignment=_ALIGNMENT)
        if len(fds) != len(manifest.chunk_bytes) or bool(manifest.device_uuid) != (device.type == "cuda"):
            raise BadHandle(f"{path} handed out {len(fds)} descriptors that are no base for {device}", socket=path)
    except (DecodeError, BadHandle) as error:
        close_all(fds)
        raise BadHandle(f"{path} handed out no base: {error}", socket=path) from error
    return SharedBase(manifest, fds, device=device)


def await_base(path: Path, *, device: torch.device, timeout_s: float) -> SharedBase:
    """Waits for the base, then acts as find_base. Raises BadHandle if it does not appear in time."""
    deadline = time.monotonic() + timeout_s
    while (base := find_base(path, device=device)) is None:
        if time.monotonic() > deadline:
            raise BadHandle(f"the engine has loaded no model within {timeout_s:g} s", socket=path)
        time.sleep(_POLL_S)
    return base
