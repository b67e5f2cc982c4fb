"""An arena of published weights, wherever its memory is: what a trainer rank publishes and every engine rank maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tasuki.transport.header import Header
from tasuki.transport.manifest import Manifest
from tasuki.v1 import weights_pb2
from tasuki.wire.errors import BadHandle


class PeerMemory(Protocol):
    """A peer's memory at addresses of ours."""

    def release(self) -> None:
        """Lets go of the memory and keeps the addresses. Idempotent."""
        ...

    def renew(self, fds: Sequence[int]) -> None:
        """After `drop`: the same bytes of the manifest in other memory, at the same addresses. The descriptors stay the caller's."""
        ...

    def close(self) -> None: ...


class WeightArena:
    """A trainer rank's arena, as its owner or a reader sees it.

    tensors: one for each entry of the manifest, of its shape and dtype, in the memory itself; none where only the header is mapped.
    memory: of a peer, None for an owner's and for a header alone. fds: the owner's, who hands them out; the header's comes first.
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
        self._memory = memory
        self.holds_memory = True

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return self._tensors

    @property
    def is_mapped(self) -> bool:
        """Whether there is more than the header."""
        return len(self._tensors) == len(self.manifest.entries)

    def release(self) -> None:
        """Lets go of a peer's memory. Its tensors must not be used until `renew`."""
        if self._memory is not None:
            self._memory.release()
        self.holds_memory = False

    def renew(self, manifest: Manifest, fds: Sequence[int]) -> None:
        """Takes a peer's memory again, which is other memory by now. Raises BadHandle, and then holds none."""
        if manifest != self.manifest or len(fds) != 1 + len(manifest.chunk_bytes):
            raise BadHandle(f"rank {manifest.rank} published in another layout than its handle says", rank=manifest.rank)
        self.release()
        if self._memory is not None:
            self._memory.renew(fds[1:])
        self.holds_memory = True

    def release_tensors(self) -> None:
        """No tensor of it is used from here on."""
        self._tensors.clear()

    def close(self) -> None:
        """A reader's end: lets go of the memory; no tensor in it may be used any more."""
        self.header.close()
        self._tensors.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
