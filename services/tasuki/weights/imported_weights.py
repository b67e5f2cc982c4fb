"""The receiver's side of the weight exchange: arenas of all trainer ranks, mapped once, and checks of what engine ranks received."""

import hashlib
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from google.protobuf.message import DecodeError

from tasuki.v1 import weights_pb2
from tasuki.weights.checksum import checksum
from tasuki.weights.chunk_memory import ImportedAllocation, ImportedChunks
from tasuki.weights.fd_socket import close_all, fetch
from tasuki.weights.manifest import Entry, Manifest, check_complete, digest_of, entries_by_name, from_proto, header_bytes
from tasuki.weights.plan import Slice, count_uncovered, whole
from tasuki.weights.split import indices_of
from tasuki.weights.weight_arena import Header, WeightArena, device_uuid, map_sealed
from tasuki.wire.errors import BadHandle, VersionOrder, WeightsCorrupt


class ImportedWeights:
    """Every published tensor of one trainer, readable in place. Created by `import_weights`."""

    def __init__(self, handles: Sequence[weights_pb2.WeightHandle], arenas: Sequence[WeightArena], *, boot_id: str) -> None:
        self.boot_id = boot_id
        self.entries = entries_by_name(arena.manifest for arena in arenas)
        self._named = [_named(handle) for handle in handles]
        self._generations = [handle.generation for handle in handles]
        self._leaves = [handle.leaves for handle in handles]
        self._arenas = list(arenas)
        places = {name: place for place, name in enumerate(self.entries)}
        self._places = [np.array([places[entry.name] for entry in arena.manifest.entries], dtype=np.intp) for arena in arenas]
        self._by_name = np.argsort(np.array(list(self.entries)), kind="stable")
        whole = ((name, entries[0].dtype, *entries[0].global_shape) for name, entries in sorted(self.entries.items()))
        self._layout_digest = hashlib.sha256(repr(list(whole)).encode()).digest()
        self._tensors = {
            (entry.name, entry.offsets): (tensor, arena.manifest.rank)
            for arena in arenas
            if arena.is_mapped
            for entry, tensor in zip(arena.manifest.entries, arena.tensors, strict=True)
        }

    @property
    def is_mapped(self) -> bool:
        """Whether tensors are readable, not only headers."""
        return all(arena.is_mapped for arena in self._arenas)

    def is_of(self, published: weights_pb2.PublishedWeights) -> bool:
        """Whether `published` names these arenas, so that they need at most be renewed."""
        return self.boot_id == published.boot_id and self._named == [_named(handle) for handle in published.handles]

    def renew(self, published: weights_pb2.PublishedWeights, *, timeout_s: float) -> None:
        """Maps memory that was released or replaced at the same addresses again. Raises BadHandle.

        published: of these arenas (`is_of`).
        """
        deadline = time.monotonic() + timeout_s
        for index, (arena, handle) in enumerate(zip(self._arenas, published.handles, strict=True)):
            if not self._is_current(index, handle):
                sent, fds = fetch(Path(handle.socket_path), timeout_s=max(0.001, deadline - time.monotonic()))
                try:
                    # Nearly always the same: then it needs no further checks, which take milliseconds.
                    manifest = arena.manifest if sent == arena.message else _checked_manifest(sent, handle)
                    arena.renew(manifest, fds)
                finally:
                    close_all(fds)
            self._generations[index], self._leaves[index] = handle.generation, handle.leaves

    def is_current(self, published: weights_pb2.PublishedWeights) -> bool:
        """Whether `hold` has nothing to map and takes no time."""
        return all(self._is_current(index, handle) for index, handle in enumerate(published.handles))

    def _is_current(self, index: int, handle: weights_pb2.WeightHandle) -> bool:
        arena = self._arenas[index]
        has_memory = arena.is_mapped and bool(arena.manifest.entries)
        return not has_memory or (arena.holds_memory and self._generations[index] == handle.generation)

    def hold(self, published: weights_pb2.PublishedWeights, *, timeout_s: float) -> None:
        """Maps what is needed to read the published version, until `release`. On BadHandle or VersionOrder everything is released."""
        try:
            self.renew(published, timeout_s=timeout_s)
            self.check_version(published.policy_version)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Releases memory that its owner is about to free, since mappings keep it alive. Headers stay mapped."""
        for arena, leaves in zip(self._arenas, self._leaves, strict=True):
            if leaves and arena.is_mapped:
                arena.release()

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every whole tensor."""
        return {name: (entries[0].global_shape, getattr(torch, entries[0].dtype)) for name, entries in self.entries.items()}

    def tensor(self, entry: Entry) -> torch.Tensor:
        """The slice of `entry` in the owner's memory. Read-only."""
        return self._tensors[entry.name, entry.offsets][0]

    def owner(self, entry: Entry) -> int:
        """The trainer rank that holds the slice of `entry`."""
        return self._tensors[entry.name, entry.offsets][1]

    def first_owner(self, device: torch.device) -> int:
        """The owner that `device` should read first: the rank after its own, so that GPUs start with different owners."""
        if device.type != "cuda":
            return 0
        here = device_uuid(device)
        local = [arena.manifest.rank for arena in self._arenas if arena.manifest.device_uuid == here]
        return (local[0] + 1 if local else device.index or 0) % len(self._arenas)

    def gathered(self, name: str) -> torch.Tensor:
        """A copy of the whole tensor."""
        entries = self.entries[name]
        copy = self.tensor(entries[0]).new_empty(entries[0].global_shape)
        for entry in entries:
            copy[tuple(map(slice, entry.offsets, entry.box.ends))] = self.tensor(entry)
        return copy

    def check_version(self, version: int) -> None:
        """Raises VersionOrder unless every rank currently publishes `version`."""
        for arena in self._arenas:
            header = arena.header.read()
            if header.version != version:
                have = header.state.name.lower() if header.version is None else header.version
                rank = arena.manifest.rank
                text = f"asked for policy version {version}, but the arena of trainer rank {rank} holds {have}"
                raise VersionOrder(text, want=version, have=have, rank=rank)

    def checksums(self) -> np.ndarray:
        """Published checksum of each whole tensor: uint64, in the order of `entries`."""
        totals = np.zeros(len(self.entries), dtype=np.uint64)
        for arena, places in zip(self._arenas, self._places, strict=True):
            np.add.at(totals, places, arena.header.checksums())
        return totals

    def checksums_by_name(self) -> list[int]:
        """The same in name order, which does not depend on sharding."""
        return self.checksums()[self._by_name].tolist()

    def layout_digest(self) -> bytes:
        """SHA-256 of names, dtypes and shapes of the whole tensors, in name order."""
        return self._layout_digest

    def changed_ranks(self, name: str) -> set[int]:
        """Trainer ranks whose slice of the tensor no longer matches its published checksum."""
        changed: set[int] = set()
        for arena in self._arenas:
            for entry, value in zip(arena.manifest.entries, arena.header.checksums().tolist(), strict=True):
                if entry.name == name and checksum(self.tensor(entry), indices_of(entry)) != value:
                    changed.add(arena.manifest.rank)
        return changed

    def close(self) -> None:
        """Unmaps the arenas; their tensors must no longer be used."""
        self._tensors.clear()
        for arena in self._arenas:
            arena.close()


def import_weights(
    published: weights_pb2.PublishedWeights, *, timeout_s: float, device: torch.device | None = None
) -> ImportedWeights:
    """Maps the arenas of all handles read-only. Raises BadHandle if one of them, or their combination, is invalid.

    device: where they will be read. None, for a process without a device, maps only the headers of arenas on a GPU.
    """
    if not published.handles:
        raise BadHandle("no weight handles were given")
    for index, rank in enumerate(sorted(handle.rank for handle in published.handles)):
        if rank != index:
            wrong = f"rank {index} is missing" if rank > index else f"rank {rank} is there twice"
            text = f"expected one weight handle for each trainer rank: of {len(published.handles)}, {wrong}"
            raise BadHandle(text, rank=min(rank, index))
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack:
        arenas: list[WeightArena] = []
        for handle in published.handles:
            arena = _import_arena(handle, timeout_s=max(0.001, deadline - time.monotonic()), device=device)
            stack.callback(arena.close)
            arena.header.read()  # refuses an arena without a valid header
            arenas.append(arena)
            if (num_ranks := arena.manifest.num_ranks) != len(published.handles):
                text = f"{len(published.handles)} weight handles were given, but the trainer has {num_ranks} ranks"
                raise BadHandle(text, num_ranks=num_ranks)
        check_complete([arena.manifest for arena in arenas])
        stack.pop_all()
    return ImportedWeights(published.handles, arenas, boot_id=published.boot_id)


def _named(handle: weights_pb2.WeightHandle) -> tuple[object, ...]:
    """The part of a handle that is the same in every sync."""
    return handle.rank, handle.socket_path, handle.manifest_digest, handle.kind


_PLACES = {
    weights_pb2.HANDLE_KIND_HOST_MEMFD: "cpu",
    weights_pb2.HANDLE_KIND_CUDA_VMM_FD: "cuda",
    weights_pb2.HANDLE_KIND_CUDA_IPC: "cuda",
}


def _checked_manifest(sent: bytes, handle: weights_pb2.WeightHandle) -> Manifest:
    try:
        manifest = from_proto(weights_pb2.WeightManifest.FromString(sent))
    except DecodeError as error:
        raise BadHandle(f"{handle.socket_path} sent no manifest: {error}", rank=handle.rank) from error
    if manifest.rank != handle.rank or digest_of(sent) != handle.manifest_digest:
        text = f"{handle.socket_path} sent a manifest that differs from the handle of rank {handle.rank}"
        raise BadHandle(text, rank=handle.rank)
    return manifest


def _import_arena(handle: weights_pb2.WeightHandle, *, timeout_s: float, device: torch.device | None) -> WeightArena:
    rank, wanted, kind = handle.rank, _PLACES.get(handle.kind), _kind_name(handle)
    if wanted is None:
        raise BadHandle(f"trainer rank {rank}: handles of kind {kind} cannot be imported", rank=rank)
    sent, fds = fetch(Path(handle.socket_path), timeout_s=timeout_s)
    try:
        manifest = _checked_manifest(sent, handle)
        if bool(manifest.device_uuid) != (wanted == "cuda") or (device is not None and device.type != wanted):
            place = f"GPU {manifest.device_uuid}" if manifest.device_uuid else "host memory"
            text = f"trainer rank {rank}: handle of kind {kind} for weights in {place} cannot be imported on {device or 'the host'}"
            raise BadHandle(text, rank=rank)
        if (manifest.ipc_memory is not None) != (handle.kind == weights_pb2.HANDLE_KIND_CUDA_IPC):
            raise BadHandle(f"trainer rank {rank}: its manifest is not one of {kind}", rank=rank)
        if len(fds) != 1 + len(manifest.chunk_bytes):
            text = f"trainer rank {rank} sent {len(fds)} descriptors for a header and {len(manifest.chunk_bytes)} chunks"
            raise BadHandle(text, rank=rank)
        header = Header(manifest, map_sealed(fds[0], header_bytes(len(manifest.entries)), rank=rank))
        if not manifest.entries or (device is None and wanted == "cuda"):
            return WeightArena(manifest, kind=handle.kind, header=header, tensors=(), message=sent)
        place = device or torch.device("cpu")
        if place.type == "cuda":
            _check_reach(manifest, place)
        ipc = manifest.ipc_memory is not None
        memory = ImportedAllocation(manifest, device=place) if ipc else ImportedChunks(manifest, fds[1:], device=place)
        tensors = memory.tensors()
        return WeightArena(manifest, kind=handle.kind, header=header, tensors=tensors, memory=memory, message=sent)
    finally:
        close_all(fds)


def _check_reach(manifest: Manifest, device: torch.device) -> None:
    """Raises BadHandle unless `device` can read the GPU that holds the manifest's memory."""
    visible = {device_uuid(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    owner = visible.get(manifest.device_uuid)
    if owner is None or (owner != device.index and not torch.cuda.can_device_access_peer(device, owner)):
        raise BadHandle(
            f"trainer rank {manifest.rank} publishes on GPU {manifest.device_uuid}, which {device} ({device_uuid(device)}) cannot "
            f"read; visible here: {', '.join(visible)}",
            rank=manifest.rank,
            device_uuid=manifest.device_uuid,
        )


def _kind_name(handle: weights_pb2.WeightHandle) -> str:
    return weights_pb2.HandleKind.Name(handle.kind) if handle.kind in weights_pb2.HandleKind.values() else str(handle.kind)


_NAMED_TENSORS = 5
HeldSlice = tuple[str, Slice]
"""Name of a checkpoint tensor, and an engine rank's slice of it."""


class Comparison:
    """Compares engine ranks' checksums with the published ones; built once per set of slices and used in every sync.

    Ranks that hold the same slice must agree. Different slices of a tensor must not overlap and must cover it, and their sums must add up
    to the sums in the publishers' headers.
    """

    def __init__(self, held: Sequence[tuple[int, str, Slice]], published: ImportedWeights) -> None:
        """held: rank, tensor and slice of each sum."""
        self._held, self._published = list(held), published
        place_of = {name: place for place, name in enumerate(published.entries)}
        first_of: dict[HeldSlice, int] = {}
        for place, (_, name, source) in enumerate(self._held):
            first_of.setdefault((name, source), place)
        self._first_holders = np.array([first_of[name, source] for _, name, source in self._held], dtype=np.intp)
        self._parts = np.array(list(first_of.values()), dtype=np.intp)
        self._tensor_of_part = np.array([place_of[name] for name, _ in first_of], dtype=np.intp)
        slices: defaultdict[str, list[Slice]] = defaultdict(list)
        for name, source in first_of:
            slices[name].append(source)
        # Defects of the slices whatever they hold.
        self._gaps = {name: "no engine rank reads it" for name in published.entries if not slices[name]}
        for name, of_tensor in slices.items():
            numel = whole(published.entries[name][0].global_shape).numel
            missing, repeated = count_uncovered(numel, of_tensor)
            if of_tensor and (missing or repeated):
                text = (
                    f"of {numel} elements {missing} were not received and {repeated} were received as parts of different slices"
                )
                self._gaps[name] = text

    def agrees(self, sums: np.ndarray) -> bool:
        """sums: uint64, in the order of `held`."""
        return not (self._gaps or self._differing(sums).any() or self._wrong(sums).any())

    def refuse(self, sums: np.ndarray) -> None:
        """Raises WeightsCorrupt for sums that do not agree."""
        problems = {
            self._held[place][1]: "engine ranks that hold the same slice differ"
            for place in self._differing(sums).nonzero()[0].tolist()
        }
        problems = self._gaps | problems
        names = list(self._published.entries)
        for place in self._wrong(sums).nonzero()[0].tolist():
            problems.setdefault(names[place], "checksum differs")
        named = [name for name in names if name in problems]
        ranks: set[int] = set()
        for name in named:
            at_fault, where = self._find_fault(name, sums)
            ranks |= at_fault
            problems[name] += where
        raise WeightsCorrupt(
            f"{len(named)} of {len(names)} tensors did not arrive as published: "
            + "; ".join(f"{name}: {problems[name]}" for name in named[:_NAMED_TENSORS]),
            tensors=",".join(named[:_NAMED_TENSORS]),
            rank=",".join(str(rank) for rank in sorted(ranks)),
        )

    def _differing(self, sums: np.ndarray) -> np.ndarray:
        """Mask of sums that differ from the first rank with the same slice."""
        return sums != sums[self._first_holders]

    def _wrong(self, sums: np.ndarray) -> np.ndarray:
        """Mask of tensors whose sums do not add up; uint64 wraps as the checksum requires."""
        totals = np.zeros(len(self._published.entries), dtype=np.uint64)
        np.add.at(totals, self._tensor_of_part, sums[self._parts])
        return totals != self._published.checksums()

    def _find_fault(self, name: str, sums: np.ndarray) -> tuple[set[int], str]:
        """Reads the published memory again, if possible: returns the engine ranks at fault, and where the difference is."""
        if not self._published.is_mapped:
            return set(), ""
        changed = self._published.changed_ranks(name)
        if changed:
            return set(), f" (memory of trainer rank {_listed(changed)} changed after it was published)"
        values = self._published.gathered(name).flatten()
        wrong = {
            rank
            for (rank, held, source), value in zip(self._held, sums.tolist(), strict=True)
            if held == name and checksum(values.as_strided(source.shape, source.strides, source.offset), source) != value
        }
        return wrong, f" (engine rank {_listed(wrong)})" if wrong else ""


def _listed(ranks: set[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))
