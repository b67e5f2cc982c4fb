"""The trainer's end of the weight exchange: one arena a rank, filled at every publish."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from tasuki.transport import host_memory
from tasuki.transport.checksum import checksum
from tasuki.transport.fd_socket import FdServer
from tasuki.transport.host_memory import ArenaState
from tasuki.transport.manifest import Entry, lay_out, to_proto
from tasuki.transport.plan import whole
from tasuki.transport.shards import Shard
from tasuki.v1 import weights_pb2

__all__ = ["Shard", "WeightExport"]


class WeightExport:
    """One trainer rank's published weights: memory, manifest and the socket that hands both out.

    shards: all that this rank holds, in any order; their tensors are read at every publish.
    dtype: of the published tensors; the engine's own.
    """

    def __init__(self, shards: Sequence[Shard], *, rank: int, num_ranks: int, dtype: torch.dtype, socket_path: Path) -> None:
        self._shards = list(shards)
        entries = [
            Entry(shard.name, str(dtype).removeprefix("torch."), shard.global_shape, shard.row_start, shard.local.shape[0])
            for shard in self._shards
        ]
        self._manifest = lay_out(entries, rank=rank, num_ranks=num_ranks)
        self._arena, self._fd = host_memory.create_arena(self._manifest)
        self._server = FdServer(socket_path, message=to_proto(self._manifest).SerializeToString(), fd=self._fd)

    def handle(self) -> weights_pb2.WeightHandle:
        return weights_pb2.WeightHandle(
            rank=self._manifest.rank,
            socket_path=str(self._server.path),
            manifest_digest=self._manifest.digest(),
            kind=weights_pb2.HANDLE_KIND_HOST_MEMFD,
        )

    @torch.no_grad()
    def publish(self, version: int) -> int:
        """Casts every shard into the arena and marks it as `version`. Returns the bytes published."""
        self._arena.write_state(ArenaState.WRITING)
        checksums: list[int] = []
        for shard, entry, published in zip(self._shards, self._manifest.entries, self._arena.tensors, strict=True):
            published.copy_(shard.local)
            checksums.append(checksum(published, whole(entry.shape, offset=entry.first_element)))
        self._arena.write_published(version, checksums)
        return sum(entry.num_bytes for entry in self._manifest.entries)

    def withdraw(self) -> None:
        """Makes the published version invalid; readers that check the header refuse it."""
        self._arena.write_state(ArenaState.WITHDRAWN)

    def close(self) -> None:
        """Idempotent. Readers keep what they have mapped; nobody new gets a descriptor."""
        if self._fd >= 0:
            self._server.close()
            os.close(self._fd)
            self._fd = -1
            self._arena.close()
