"""The trainer's side of the weight exchange: one arena per rank, updated at every publish."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch

from tasuki.memory.arena import Arena
from tasuki.v1 import weights_pb2
from tasuki.weights.chunk_memory import ChunkMemory
from tasuki.weights.copies import (
    Checksums,
    Copies,
    SummedCopies,
    ViewChecksum,
    ViewCopy,
    prepare_checksums,
    prepare_copies,
    prepare_summed_copies,
)
from tasuki.weights.fd_socket import FdServer
from tasuki.weights.header import ArenaState, Header, create_sealed
from tasuki.weights.ipc_memory import IpcAllocation
from tasuki.weights.manifest import Entry, Manifest, check, header_bytes, lay_out, to_proto
from tasuki.weights.plan import Slice
from tasuki.weights.shards import Shard
from tasuki.weights.split import indices_of
from tasuki.weights.weight_arena import WeightArena


@dataclass(frozen=True, slots=True)
class ExportMemory:
    """How published weights are stored.

    parameters: arena whose tensors are published in place if they have the published dtype; all others are copied.
    leaves: whether the memory is freed between publications (`WeightExport.released`). handles: "ipc" copies everything to an allocation
    of torch's, which cannot leave.
    """

    parameters: Arena | None = None
    leaves: bool = False
    handles: Literal["vmm", "ipc"] = "vmm"


class Place(NamedTuple):
    """Where a shard is published."""

    held: torch.Tensor
    """The memory that readers see."""
    where: Slice
    """Indices of its elements in the whole tensor."""


class Replaced(Protocol):
    """Content that is published in the place of some shards."""

    @property
    def names(self) -> frozenset[str]:
        """Names of these shards; the same in every publication."""
        ...

    def fill(self, places: Mapping[str, Place]) -> Mapping[str, int]:
        """Writes the content of each name. Returns the checksums of what the memory then holds."""
        ...


class _Memory(Protocol):
    @property
    def kind(self) -> weights_pb2.HandleKind.ValueType: ...
    @property
    def fds(self) -> Sequence[int]: ...
    @property
    def copies(self) -> Arena | None: ...
    def open(self, manifest: Manifest, sources: Sequence[torch.Tensor]) -> tuple[Manifest, list[torch.Tensor]]: ...
    def release(self) -> None: ...
    def close(self) -> None: ...


class WeightExport:
    """One trainer rank's published weights: memory, manifest, and the socket that shares both.

    shards: everything this rank holds, on one device, in any order; their tensors are read at every publish.
    dtype: of the published tensors; the engine's dtype.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        rank: int,
        num_ranks: int,
        dtype: torch.dtype,
        socket_path: Path,
        memory: ExportMemory | None = None,
    ) -> None:
        """Raises OutOfGpuMemory if there is no room for the copies."""
        self._shards = list(shards)
        self._device = shards[0].local.device if shards else torch.device("cpu")
        self._leaves = memory is not None and memory.leaves
        entries = [
            Entry(shard.name, str(dtype).removeprefix("torch."), shard.global_shape, shard.offsets, tuple(shard.local.shape))
            for shard in self._shards
        ]
        self._layout = lay_out(entries, rank=rank, num_ranks=num_ranks)
        self._generation = 0
        self._is_away = False
        self._described: _Described | None = None
        self._opened_for: list[int] = []
        self._prepared: _Prepared | None = None
        self._prepared_for: list[int] = []
        with ExitStack() as cleanup:
            self._memory = _memory(memory or ExportMemory(), device=self._device)
            cleanup.callback(self._memory.close)
            mapping, self._header_fd = create_sealed(f"tasuki-weights-{rank}", header_bytes(len(entries)))
            cleanup.callback(os.close, self._header_fd)
            self._header = Header(self._layout, mapping)
            cleanup.callback(self._header.close)
            self._header.write_state(ArenaState.EMPTY)
            self._arena = self._open()
            self._server = FdServer(socket_path, message=self._message(), fds=self._arena.fds)
            cleanup.callback(self._server.close)
            self._cleanup = cleanup.pop_all()

    @property
    def copies(self) -> Arena | None:
        """The arena of the copies, to pause and count its memory; None if there is none or it is not ours."""
        return self._memory.copies

    def handle(self) -> weights_pb2.WeightHandle:
        assert self._described is not None
        return weights_pb2.WeightHandle(
            rank=self._arena.manifest.rank,
            socket_path=str(self._server.path),
            manifest_digest=self._described.digest,
            kind=self._arena.kind,
            generation=self._generation,
            leaves=self._leaves,
        )

    def publish(self, version: int, *, replaced: Replaced | None = None) -> int:
        """Updates every shard for readers and marks all as `version`. Returns the bytes published.

        Tensors published in place are only summed. Memory that was freed must be allocated again.
        replaced: shards that are not copied, but written by it.
        """
        if self._is_away or self._opened_for != self._addresses():
            self._hand_out_again()
        prepared = self._prepare()
        self._header.write_state(ArenaState.WRITING)
        sums = prepared.fill() if replaced is None else prepared.fill_with(replaced)
        self._header.write_published(version, sums)
        return sum(entry.num_bytes for entry in self._arena.manifest.entries)

    def damage(self) -> None:
        """Injected fault: changes one element of the published memory, after its checksum was computed."""
        held = next(tensor for tensor in self._arena.tensors if tensor.numel())
        held[(0,) * held.dim()].neg_()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def withdraw(self) -> None:
        """Invalidates the published version; readers that check the header refuse it."""
        self._header.write_state(ArenaState.WITHDRAWN)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Releases the memory for the block: withdraws the publication and stops sharing, so that the arenas can free it.

        On error the memory is shared again. Memory that a reader has mapped stays alive until the reader releases it.
        """
        if not self._is_away:
            self._server.stop_serving()
            self._memory.release()
        try:
            yield
        except BaseException:
            if not self._is_away:
                self._hand_out_again()
            raise
        self._is_away = True
        self.withdraw()

    def close(self) -> None:
        """Idempotent. Readers keep what they have mapped; nobody else gets a descriptor."""
        self._prepared = None
        self._arena.release_tensors()
        self._cleanup.close()

    def _hand_out_again(self) -> None:
        self._arena = self._open()
        self._server.hand_out(self._message(), self._arena.fds)
        self._is_away = False

    def _open(self) -> WeightArena:
        manifest, tensors = self._memory.open(self._layout, [shard.local.detach() for shard in self._shards])
        if self._described is None or manifest != self._described.manifest:
            check(manifest)
            self._described = _Described(manifest, to_proto(manifest), manifest.digest())
        self._generation += 1
        self._opened_for = self._addresses()
        places = [*self._opened_for, *(tensor.data_ptr() for tensor in tensors)]
        if places != self._prepared_for:
            self._prepared, self._prepared_for = None, places
        fds = [self._header_fd, *self._memory.fds]
        return WeightArena(manifest, kind=self._memory.kind, header=self._header, tensors=tensors, fds=fds)

    def _message(self) -> bytes:
        assert self._described is not None
        return self._described.message.SerializeToString()

    def _addresses(self) -> list[int]:
        return [shard.local.data_ptr() for shard in self._shards]

    def _prepare(self) -> _Prepared:
        if self._prepared is None:
            self._prepared = _Prepared(self._arena, [shard.local.detach() for shard in self._shards], device=self._device)
        return self._prepared


@dataclass(frozen=True, slots=True)
class _Described:
    """A checked manifest, its message and its digest; kept, because making them takes milliseconds."""

    manifest: Manifest
    message: weights_pb2.WeightManifest
    digest: str


class _Prepared:
    """Ways to fill an arena from tensors and to sum it, prepared at their first use: a trainer needs one or two of them."""

    def __init__(self, arena: WeightArena, sources: Sequence[torch.Tensor], *, device: torch.device) -> None:
        self._device = device
        self._names = [entry.name for entry in arena.manifest.entries]
        self._held = [Place(held, indices_of(entry)) for entry, held in zip(arena.manifest.entries, arena.tensors, strict=True)]
        self._others: tuple[frozenset[str], SummedCopies] | None = None
        self._copies = [
            ViewCopy(held, source, where=where, slot=slot)
            for slot, ((held, where), source) in enumerate(zip(self._held, sources, strict=True))
            if held.data_ptr() != source.data_ptr()
        ]
        self._has_in_place = len(self._copies) < len(self._held)

    def fill_with(self, replaced: Replaced) -> Sequence[int]:
        """Copies all but some, which are written by `replaced`. Returns the sums."""
        names = replaced.names
        if self._others is None or self._others[0] != names:
            kept = [copy for copy in self._copies if self._names[copy.slot] not in names]
            summed = prepare_summed_copies(kept, num_sums=len(self._held), device=self._device, counts_destinations=True)
            self._others = names, summed
        _, others = self._others
        others.start()
        written = replaced.fill({name: place for name, place in zip(self._names, self._held, strict=True) if name in names})
        if self._has_in_place:
            return self._checksums.read()
        sums: list[int] = others.sums().tolist()
        return [written.get(name, each) for name, each in zip(self._names, sums, strict=True)]

    @cached_property
    def _checksums(self) -> Checksums:
        views = [ViewChecksum(held, where, held.dtype) for held, where in self._held]
        return prepare_checksums(views, device=self._device)

    def fill(self) -> Sequence[int]:
        """Copies everything; tensors in place are only summed. Returns the sums."""
        casts = any(copy.source.dtype != copy.destination.dtype for copy in self._copies)
        # A CPU sums what it casts faster in a second pass.
        if self._has_in_place or (casts and self._device.type == "cpu"):
            self._plain.start()
            return self._checksums.read()
        self._summed.start()
        return self._summed.sums().tolist()

    @cached_property
    def _plain(self) -> Copies:
        return prepare_copies(self._copies, device=self._device)

    @cached_property
    def _summed(self) -> SummedCopies:
        return prepare_summed_copies(self._copies, num_sums=len(self._held), device=self._device, counts_destinations=True)


def _memory(memory: ExportMemory, *, device: torch.device) -> _Memory:
    if memory.handles == "ipc":
        assert not memory.leaves and memory.parameters is None
        return IpcAllocation(device=device)
    return ChunkMemory(parameters=memory.parameters, device=device)
