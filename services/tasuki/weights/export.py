"""The trainer's side of the weight exchange: one arena per rank, updated at every publish."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch

from tasuki.memory.arena import Arena
from tasuki.models.family import CheckpointNames
from tasuki.v1 import weights_pb2
from tasuki.weights.chunk_memory import ChunkMemory, IpcAllocation
from tasuki.weights.copies import ViewCopy, prepare_copies
from tasuki.weights.fd_socket import FdServer
from tasuki.weights.manifest import Box, Entry, Manifest, check, digest_of, header_bytes, lay_out, to_proto
from tasuki.weights.plan import Slice
from tasuki.weights.split import indices_of
from tasuki.weights.weight_arena import ArenaState, Header, WeightArena, create_sealed


@dataclass(frozen=True, slots=True)
class Shard:
    """The slice of the checkpoint tensor `name` at `offsets`, in the shape of `local`: rows, columns, or both.

    offsets: one per dimension of `global_shape`. local: a live view of the rank's master weights, read at every publish.
    """

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local: torch.Tensor
    keeps_dtype: bool = False
    """Whether it is published and exported in its own dtype."""
    write: Callable[[Sequence[torch.Tensor]], None] | None = None
    """Writes other content than `local`'s, of consecutive shards that share it at once. May be collective: called in order of shards."""

    @property
    def box(self) -> Box:
        return Box(self.offsets, tuple(self.local.shape))


def fill_shards(places: Iterable[tuple[Shard, torch.Tensor]]) -> None:
    """Writes the content of each shard to its tensor."""
    for write, some in groupby(places, key=lambda place: place[0].write):
        if write is not None:
            write([held for _, held in some])
            continue
        for shard, held in some:
            held.copy_(shard.local)


def checkpoint_shards(
    name: str, global_shape: tuple[int, ...], offsets: tuple[int, ...], local: torch.Tensor, *, names: CheckpointNames
) -> list[Shard]:
    """The shards, under checkpoint names, in the slice `local` at `offsets` of the module parameter `name`; none if it is empty.

    Usually the same slice. transformers 5 fuses experts, one row each (gate_up_proj [E, 2 I, H], gate first, and down_proj [E, H, I]),
    while a checkpoint has two-dimensional tensors per expert. names: of the model's family.
    """
    if local.numel() == 0:
        return []
    parts = names.fused(name)
    if not parts:
        return [Shard(names.tensor(name), global_shape, offsets, local)]
    shards: list[Shard] = []
    for index, expert in enumerate(local, start=offsets[0]):
        for part, shape, at, weight in _expert_parts(parts, global_shape[1:], offsets[1:], expert):
            shards.append(Shard(names.expert(name, index, part), shape, at, weight))
    return shards


_Part = tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]


def _expert_parts(
    names: tuple[str, ...], shape: tuple[int, ...], offsets: tuple[int, ...], expert: torch.Tensor
) -> list[_Part]:
    """Name, shape, offsets and values of the tensors that a slice of a fused one overlaps."""
    num_rows = shape[0] // len(names)
    parts: list[_Part] = []
    for place, part in enumerate(names):
        start = max(0, offsets[0] - place * num_rows)
        skipped = place * num_rows + start - offsets[0]
        length = min(num_rows - start, expert.shape[0] - skipped)
        if length > 0:
            parts.append((part, (num_rows, *shape[1:]), (start, *offsets[1:]), expert.narrow(0, skipped, length)))
    return parts


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
        """Names of these shards, one a tensor; the same in every publication."""
        ...

    def fill(self, places: Mapping[str, Place]) -> Mapping[str, int]:
        """Writes the content of each name. Returns the checksums of what the memory then holds."""
        ...


class _Described(NamedTuple):
    """A manifest, its message and its digest; kept, because making them takes milliseconds."""

    manifest: Manifest
    message: bytes
    digest: str

    @classmethod
    def of(cls, manifest: Manifest) -> "_Described":
        message = to_proto(manifest).SerializeToString()
        return cls(manifest, message, digest_of(message))


class WeightExport:
    """One trainer rank's published weights: memory, manifest, and the socket that shares both.

    shards: everything this rank holds, on one device, in any order; their tensors are read at every publish.
    dtype: of the published tensors but those that keep theirs; the engine's dtype.
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
            Entry(shard.name, str(each).removeprefix("torch."), shard.global_shape, shard.offsets, tuple(shard.local.shape))
            for shard in self._shards
            for each in [shard.local.dtype if shard.keeps_dtype else dtype]
        ]
        self._layout = lay_out(entries, rank=rank, num_ranks=num_ranks)
        self._generation = 0
        self._is_away = False
        self._described = _Described.of(self._layout)
        self._opened_for: list[int] = []
        self._prepared: _Prepared | None = None
        self._prepared_for: list[int] = []
        with ExitStack() as cleanup:
            memory = memory or ExportMemory()
            if memory.handles == "ipc":
                assert not memory.leaves and memory.parameters is None
                self._memory = IpcAllocation(device=self._device)
            else:
                self._memory = ChunkMemory(parameters=memory.parameters, device=self._device)
            cleanup.callback(self._memory.close)
            mapping, self._header_fd = create_sealed(f"tasuki-weights-{rank}", header_bytes(len(entries)))
            cleanup.callback(os.close, self._header_fd)
            self._header = Header(self._layout, mapping)
            cleanup.callback(self._header.close)
            self._header.write_state(ArenaState.EMPTY)
            self._arena = self._open()
            self._server = FdServer(socket_path, message=self._described.message, fds=self._arena.fds)
            cleanup.callback(self._server.close)
            self._cleanup = cleanup.pop_all()

    @property
    def copies(self) -> Arena | None:
        """The arena of the copies, to pause and count its memory; None if there is none or it is not ours."""
        return self._memory.copies

    def handle(self) -> weights_pb2.WeightHandle:
        handle = weights_pb2.WeightHandle(rank=self._arena.manifest.rank, socket_path=str(self._server.path))
        handle.manifest_digest, handle.kind = self._described.digest, self._arena.kind
        handle.generation, handle.leaves = self._generation, self._leaves
        return handle

    def publish(self, version: int, *, replaced: Replaced | None = None) -> int:
        """Updates every shard for readers and marks all as `version`. Returns the bytes published.

        Tensors published in place are only summed. Memory that was freed must be allocated again.
        replaced: shards that are not copied, but written by it.
        """
        if self._is_away or self._opened_for != self._addresses():
            self._hand_out_again()
        names = frozenset[str]() if replaced is None else replaced.names
        assert names <= {shard.name for shard in self._shards}, "what is replaced must be published"
        if self._prepared is None or self._prepared.names != names:
            sources = [shard.local.detach() if shard.write is None else None for shard in self._shards]
            self._prepared = _Prepared(self._arena, sources, names=names, device=self._device)
        self._header.write_state(ArenaState.WRITING)
        fill_shards(each for each in zip(self._shards, self._arena.tensors, strict=True) if each[0].write is not None)
        sums = self._prepared.fill(replaced)
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
        self._arena.tensors.clear()
        self._cleanup.close()

    def _hand_out_again(self) -> None:
        self._arena = self._open()
        self._server.hand_out(self._described.message, self._arena.fds)
        self._is_away = False

    def _open(self) -> WeightArena:
        manifest, tensors = self._memory.open(self._layout, [shard.local.detach() for shard in self._shards])
        if manifest != self._described.manifest:
            check(manifest)
            self._described = _Described.of(manifest)
        self._generation += 1
        self._opened_for = self._addresses()
        places = [*self._opened_for, *(tensor.data_ptr() for tensor in tensors)]
        if places != self._prepared_for:
            self._prepared, self._prepared_for = None, places
        fds = [self._header_fd, *self._memory.fds]
        return WeightArena(manifest, kind=self._memory.kind, header=self._header, tensors=tensors, fds=fds)

    def _addresses(self) -> list[int]:
        return [shard.local.data_ptr() for shard in self._shards]


class _Prepared:
    """A way to fill an arena from tensors and to sum it. names: of shards that are written otherwise."""

    def __init__(
        self, arena: WeightArena, sources: Sequence[torch.Tensor | None], *, names: frozenset[str], device: torch.device
    ) -> None:
        self.names = names
        entries = arena.manifest.entries
        places = [*map(Place, arena.tensors, map(indices_of, entries))]
        self._replaced = {entry.name: place for entry, place in zip(entries, places, strict=True) if entry.name in names}
        self._slots = {entry.name: slot for slot, entry in enumerate(entries) if entry.name in names}
        copies = [
            # Tensors in place, or already written, are only summed.
            ViewCopy(
                held=held,
                source=None if source is None or held.data_ptr() == source.data_ptr() else source,
                where=where,
                counted=held.dtype,
                slot=slot,
            )
            for slot, (entry, (held, where), source) in enumerate(zip(entries, places, sources, strict=True))
            if entry.name not in names
        ]
        self._copies = prepare_copies(copies, num_sums=len(sources), device=device)

    def fill(self, replaced: Replaced | None) -> Sequence[int]:
        """Copies everything that `replaced` does not write. Returns the sums."""
        self._copies.start()
        written = {} if replaced is None else replaced.fill(self._replaced)
        sums: list[int] = self._copies.sums().tolist()
        for name, value in written.items():
            sums[self._slots[name]] = value
        return sums
