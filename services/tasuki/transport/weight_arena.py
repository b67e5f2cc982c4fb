"""An arena of published weights, wherever its memory is: what a trainer rank fills and every engine rank maps."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from tasuki.transport.header import Header
from tasuki.transport.manifest import Manifest
from tasuki.v1 import weights_pb2


class WeightArena:
    """Made by `create_arena` or `map_arena` of host_memory or cuda_memory.

    tensors: one for each entry of the manifest, of its shape and dtype, in the memory itself; none where only the header is mapped.
    fds: of the owner, to be handed out; the header's comes first.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        kind: weights_pb2.HandleKind.ValueType,
        header: Header,
        tensors: Sequence[torch.Tensor],
        fds: Sequence[int],
        release: Callable[[], None],
    ) -> None:
        self.manifest, self.kind, self.header, self.fds = manifest, kind, header, list(fds)
        self._tensors = list(tensors)
        self._release = release

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return self._tensors

    @property
    def is_mapped(self) -> bool:
        """Whether there is more than the header."""
        return len(self._tensors) == len(self.manifest.entries)

    def close(self) -> None:
        """Lets go of the memory; no tensor in it may be used any more, unless it is the host's."""
        self.header.close()
        self._tensors.clear()
        for fd in self.fds:
            os.close(fd)
        self.fds = []
        self._release()
