"""The trainer's end of the weight exchange: one arena a rank, filled at every publish."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tasuki.transport import cuda_memory, host_memory
from tasuki.transport.copies import Checksums, Copies, ViewChecksum, ViewCopy, prepare_checksums, prepare_copies
from tasuki.transport.fd_socket import FdServer
from tasuki.transport.header import ArenaState
from tasuki.transport.manifest import Entry, Manifest, lay_out, to_proto
from tasuki.transport.plan import whole
from tasuki.transport.shards import Shard
from tasuki.transport.weight_arena import WeightArena
from tasuki.v1 import weights_pb2

__all__ = ["Shard", "WeightExport"]


class WeightExport:
    """One trainer rank's published weights: memory, manifest and the socket that hands both out.

    shards: all that this rank holds, on one device, in any order; their tensors are read at every publish. The arena is on that device.
    dtype: of the published tensors; the engine's own.
    """

    def __init__(self, shards: Sequence[Shard], *, rank: int, num_ranks: int, dtype: torch.dtype, socket_path: Path) -> None:
        self._shards = list(shards)
        entries = [
            Entry(shard.name, str(dtype).removeprefix("torch."), shard.global_shape, shard.row_start, shard.local.shape[0])
            for shard in self._shards
        ]
        self._device = shards[0].local.device if shards else torch.device("cpu")
        self._arena = _create_arena(lay_out(entries, rank=rank, num_ranks=num_ranks), device=self._device)
        self._prepared: tuple[Copies, Checksums] | None = None
        self._prepared_for: list[int] = []
        message = to_proto(self._arena.manifest).SerializeToString()
        self._server = FdServer(socket_path, message=message, fds=self._arena.fds)

    def handle(self) -> weights_pb2.WeightHandle:
        return weights_pb2.WeightHandle(
            rank=self._arena.manifest.rank,
            socket_path=str(self._server.path),
            manifest_digest=self._arena.manifest.digest(),
            kind=self._arena.kind,
        )

    def publish(self, version: int, *, replaced: Iterable[tuple[str, torch.Tensor]] = ()) -> int:
        """Casts every shard into the arena and marks it as `version`. Returns the bytes published.

        replaced: name and rows of tensors that are published in the place of the shards of these names; taken one by one.
        """
        copies, checksums = self._prepare()
        self._arena.header.write_state(ArenaState.WRITING)
        copies.start()
        published = {entry.name: held for entry, held in zip(self._arena.manifest.entries, self._arena.tensors, strict=True)}
        for name, tensor in replaced:
            published[name].copy_(tensor)
        self._arena.header.write_published(version, checksums.read())
        return sum(entry.num_bytes for entry in self._arena.manifest.entries)

    def withdraw(self) -> None:
        """Makes the published version invalid; readers that check the header refuse it."""
        self._arena.header.write_state(ArenaState.WITHDRAWN)

    def close(self) -> None:
        """Idempotent. Readers keep what they have mapped; nobody new gets a descriptor."""
        if self._arena.fds:
            self._server.close()
            self._prepared = None
            self._arena.close()

    def _prepare(self) -> tuple[Copies, Checksums]:
        """Prepared anew when a shard has moved."""
        addresses = [shard.local.data_ptr() for shard in self._shards]
        if self._prepared is None or self._prepared_for != addresses:
            published = list(zip(self._arena.manifest.entries, self._arena.tensors, strict=True))
            copies = [ViewCopy(held, shard.local.detach()) for (_, held), shard in zip(published, self._shards, strict=True)]
            views = [
                ViewChecksum(held, whole(entry.shape, offset=entry.first_element), held.dtype) for entry, held in published
            ]
            self._prepared = prepare_copies(copies, device=self._device), prepare_checksums(views, device=self._device)
            self._prepared_for = addresses
        return self._prepared


def _create_arena(manifest: Manifest, *, device: torch.device) -> WeightArena:
    return cuda_memory.create_arena(manifest, device=device) if device.type == "cuda" else host_memory.create_arena(manifest)
