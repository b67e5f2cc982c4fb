"""An arena of published weights, in any kind of memory: published by a trainer rank, mapped by every engine rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tasuki.v1 import weights_pb2
from tasuki.weights.header import Header
from tasuki.weights.manifest import Manifest
from tasuki.wire.errors import BadHandle


def device_uuid(device: torch.device) -> str:
    """CUDA's UUID of the GPU, the same in every process and container."""
    return str(torch.cuda.get_device_properties(device).uuid)


class PeerMemory(Protocol):
    """A peer's memory, mapped here."""

    def release(self) -> None:
        """Unmaps the memory but keeps its addresses. Idempotent."""
        ...

    def renew(self, fds: Sequence[int]) -> None:
        """After `release`: maps other memory with the same layout at the same addresses. The caller owns the descriptors."""
        ...

    def close(self) -> None: ...


class WeightArena:
    """A trainer rank's arena, as seen by its owner or a reader.

    tensors: one per entry of the manifest, in its shape and dtype, in the memory itself; none if only the header is mapped.
    memory: of a peer; None for an owner and for a header alone. fds: the owner's, to share; the header's comes first.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        kind: weights_pb2.HandleKind.ValueType,
        header: Header,
        tensors: Sequence[torch.Tensor],
        memory: PeerMemory | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        self.manifest, self.kind, self.header, self.fds = manifest, kind, header, list(fds)
        self._tensors = list(tensors)
        self.message: bytes | None = None
        """The manifest as its owner sent it; None for an owner."""
        self._memory = memory
        self.holds_memory = True

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return self._tensors

    @property
    def is_mapped(self) -> bool:
        """Whether more than the header is mapped."""
        return len(self._tensors) == len(self.manifest.entries)

    def release(self) -> None:
        """Unmaps a peer's memory. Its tensors must not be used until `renew`."""
        if self._memory is not None:
            self._memory.release()
        self.holds_memory = False

    def renew(self, manifest: Manifest, fds: Sequence[int]) -> None:
        """Maps a peer's current memory. On BadHandle nothing is mapped."""
        if manifest != self.manifest or len(fds) != 1 + len(manifest.chunk_bytes):
            raise BadHandle(f"rank {manifest.rank} published a layout that differs from its handle", rank=manifest.rank)
        self.release()
        if self._memory is not None:
            self._memory.renew(fds[1:])
        self.holds_memory = True

    def release_tensors(self) -> None:
        """Releases the tensors, which must no longer be used."""
        self._tensors.clear()

    def close(self) -> None:
        """Closes a reader's side: unmaps the memory, whose tensors must no longer be used."""
        self.header.close()
        self.release_tensors()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
