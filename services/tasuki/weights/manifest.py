"""Contents of one trainer rank's arena: names, dtypes, slices and offsets; overlaps and gaps of slices. Pure data and its checks."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise, takewhile
from operator import gt

from tasuki.memory.granularity import rounded_up
from tasuki.v1 import weights_pb2
from tasuki.wire.errors import BadHandle

ALIGNMENT = 256
"""Alignment of entries in bytes, chosen for vector loads and copy engines."""
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
HEADER_FIXED_WORDS = 4
"""64-bit words before the checksums: magic, number of entries, state, version."""
MAX_CHUNKS = 252
"""With the header's, the most descriptors that fit in one message."""
_WORD_BYTES = 8
_MAX_NAME = 512
# cudaIpcMemHandle_t, which torch prefixes with two bytes.
_IPC_HANDLE_BYTES = 64
_MAX_DIMS = 8


@dataclass(frozen=True, slots=True)
class Box:
    """The elements whose index in each dimension lies in [offset, offset + size)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def intersection(self, other: "Box") -> "Box | None":
        """The common elements; None if there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(end - start for start, end in zip(starts, map(min, self.ends, other.ends), strict=True))
        return Box(starts, sizes) if min(sizes) > 0 else None

    def halves(self, dim: int, at: int) -> "tuple[Box, Box]":
        """The elements before index `at` of `dim`, and the rest."""
        first = at - self.offsets[dim]
        return self._with(dim, self.offsets[dim], first), self._with(dim, at, self.sizes[dim] - first)

    def _with(self, dim: int, offset: int, size: int) -> "Box":
        offsets = (*self.offsets[:dim], offset, *self.offsets[dim + 1 :])
        return Box(offsets, (*self.sizes[:dim], size, *self.sizes[dim + 1 :]))

    def __str__(self) -> str:
        """Formats as a Python slice: [0:4, 6:8]."""
        return f"[{', '.join(f'{start}:{end}' for start, end in zip(self.offsets, self.ends, strict=True))}]"


def first_overlap(boxes: Sequence[Box]) -> Box | None:
    """Elements that two of the boxes share; None if there are none."""
    num_dims = len(boxes[0].sizes)
    # Comparing along the dimension that separates most boxes leaves few pairs.
    dim = max(range(num_dims), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    ordered = sorted(boxes, key=lambda box: box.offsets[dim])
    for index, box in enumerate(ordered):
        end = box.ends[dim]
        for other in takewhile(lambda other, end=end: other.offsets[dim] < end, ordered[index + 1 :]):
            shared = box.intersection(other)
            if shared is not None:
                return shared
    return None


def first_gap(boxes: Sequence[Box], shape: tuple[int, ...]) -> Box | None:
    """Elements of a tensor of `shape` that no box covers; None if all are covered. Boxes must be inside and disjoint.

    The number of elements shows which half of a region has a gap, so the search never branches.
    """
    region = Box((0,) * len(shape), shape)
    held = list(boxes)
    if _numel(held) == region.numel:
        return None
    while held:
        dim, at = _face(held[0], region)
        for half in region.halves(dim, at):
            inside = [shared for box in held if (shared := box.intersection(half)) is not None]
            if _numel(inside) < half.numel:
                region, held = half, inside
                break
    return region


def _numel(boxes: Sequence[Box]) -> int:
    return sum(box.numel for box in boxes)


def _face(box: Box, region: Box) -> tuple[int, int]:
    """Dimension and index of a face of `box` that cuts `region`, which it covers partly."""
    return next(
        (dim, at)
        for dim in range(len(region.sizes))
        for at in (box.offsets[dim], box.ends[dim])
        if region.offsets[dim] < at < region.ends[dim]
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """A slice of one checkpoint tensor, row-major and contiguous, at `arena_offset` bytes in the arena.

    offsets and sizes: start and size of the slice in each dimension of `global_shape`.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    arena_offset: int = 0

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def num_bytes(self) -> int:
        return self.numel * ELEMENT_BYTES[self.dtype]


_ENTRY_FIELDS = tuple(field.name for field in fields(Entry))


@dataclass(frozen=True, slots=True)
class Manifest:
    """Layout of one rank's arena. The header has separate memory on the host.

    device_uuid: of the GPU that holds the entries; empty in host memory. Their memory is chunks of these sizes, or `ipc_memory`.
    """

    rank: int
    num_ranks: int
    arena_bytes: int
    entries: tuple[Entry, ...]
    device_uuid: str = ""
    chunk_bytes: tuple[int, ...] = ()
    ipc_memory: weights_pb2.IpcMemory | None = None


def digest_of(message: bytes) -> str:
    """SHA-256 of a manifest's message, in hex."""
    return hashlib.sha256(message).hexdigest()


def header_bytes(num_entries: int) -> int:
    return (HEADER_FIXED_WORDS + num_entries) * _WORD_BYTES


def lay_out(entries: Sequence[Entry], *, rank: int, num_ranks: int) -> Manifest:
    """Assigns aligned offsets to all entries in order, without memory. Raises BadHandle as `check` does."""
    placed, arena_bytes = place(entries)
    manifest = Manifest(rank=rank, num_ranks=num_ranks, arena_bytes=arena_bytes, entries=tuple(placed))
    check(manifest)
    return manifest


def place(entries: Iterable[Entry]) -> tuple[list[Entry], int]:
    """Places entries one after another, aligned; returns them with their total size in bytes. Raises BadHandle for an invalid one."""
    end = 0
    placed: list[Entry] = []
    for entry in entries:
        _check_content(entry)
        placed.append(replace(entry, arena_offset=end))
        end = rounded_up(end + entry.num_bytes, ALIGNMENT)
    return placed, end


def check(manifest: Manifest, *, alignment: int = ALIGNMENT) -> None:
    """Raises BadHandle unless everything lies inside the arena, aligned, apart, of known dtype, and every slice named once.

    alignment: of an entry's start, or the size of its elements where that is greater.
    """
    if not 0 <= manifest.rank < manifest.num_ranks:
        raise BadHandle(f"manifest of rank {manifest.rank} of {manifest.num_ranks}", rank=manifest.rank)
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for entry in manifest.entries:
        _check_content(entry)
        if (slice_ := (entry.name, entry.offsets)) in seen:
            raise BadHandle(f"{entry.name}: a slice is named twice in the manifest of rank {manifest.rank}", tensor=entry.name)
        seen.add(slice_)
    _check_places(manifest, alignment)
    _check_memory(manifest)


def check_complete(manifests: Sequence[Manifest]) -> None:
    """Raises BadHandle unless the manifests cover all ranks and every element of every tensor exactly once."""
    ranks = sorted(manifest.rank for manifest in manifests)
    if ranks != list(range(len(manifests))) or any(manifest.num_ranks != len(manifests) for manifest in manifests):
        declared = sorted({manifest.num_ranks for manifest in manifests})
        raise BadHandle(f"expected one manifest for each trainer rank, got ranks {ranks} of {declared}", ranks=ranks)
    for name, entries in entries_by_name(manifests).items():
        _check_slices(name, entries)


def entries_by_name(manifests: Iterable[Manifest]) -> dict[str, list[Entry]]:
    """Entries of each tensor over all ranks, ordered by offsets."""
    by_name: defaultdict[str, list[Entry]] = defaultdict(list)
    for manifest in manifests:
        for entry in manifest.entries:
            by_name[entry.name].append(entry)
    return {name: sorted(entries, key=lambda entry: entry.offsets) for name, entries in by_name.items()}


def to_proto(manifest: Manifest) -> weights_pb2.WeightManifest:
    entries = [
        weights_pb2.ManifestEntry(**{name: getattr(entry, name) for name in _ENTRY_FIELDS}) for entry in manifest.entries
    ]
    names = ("rank", "num_ranks", "arena_bytes", "device_uuid", "chunk_bytes", "ipc_memory")
    return weights_pb2.WeightManifest(entries=entries, **{name: getattr(manifest, name) for name in names})


def from_proto(message: weights_pb2.WeightManifest, *, alignment: int = ALIGNMENT) -> Manifest:
    """The manifest in `message`, checked as `check` does. Raises BadHandle."""
    if message.header_offset != 0:
        raise BadHandle(f"rank {message.rank}: header_offset is {message.header_offset} and must be 0", rank=message.rank)
    entries = tuple(
        Entry(one.name, one.dtype, tuple(one.global_shape), tuple(one.offsets), tuple(one.sizes), one.arena_offset)
        for one in message.entries
    )
    sizes = message.rank, message.num_ranks, message.arena_bytes
    ipc = message.ipc_memory if message.HasField("ipc_memory") else None
    manifest = Manifest(*sizes, entries, message.device_uuid, tuple(message.chunk_bytes), ipc)
    check(manifest, alignment=alignment)
    return manifest


def _check_content(entry: Entry) -> None:
    if not 0 < len(entry.name) <= _MAX_NAME:
        raise BadHandle(f"tensor name of {len(entry.name)} characters; 1 to {_MAX_NAME} are allowed")
    if entry.dtype not in ELEMENT_BYTES:
        raise BadHandle(f"{entry.name}: dtype {entry.dtype!r} is none of {sorted(ELEMENT_BYTES)}", tensor=entry.name)
    if not 0 < len(entry.global_shape) <= _MAX_DIMS or min(entry.global_shape) < 1:
        raise BadHandle(f"{entry.name}: shape {entry.global_shape} is empty or has too many dimensions", tensor=entry.name)
    if not len(entry.offsets) == len(entry.sizes) == len(entry.global_shape):
        text = f"{len(entry.offsets)} offsets and {len(entry.sizes)} sizes for shape {entry.global_shape}; each dimension needs one"
        raise BadHandle(f"{entry.name}: {text}", tensor=entry.name)
    box = entry.box
    if min(box.offsets) < 0 or min(box.sizes) < 1 or any(map(gt, box.ends, entry.global_shape)):
        raise BadHandle(f"{entry.name}: slice {box} is empty or not inside shape {entry.global_shape}", tensor=entry.name)


def _check_places(manifest: Manifest, alignment: int) -> None:
    for entry in manifest.entries:
        start, end, step = entry.arena_offset, entry.arena_offset + entry.num_bytes, max(alignment, ELEMENT_BYTES[entry.dtype])
        if start % step:
            raise BadHandle(f"{entry.name}: arena_offset {start} is not a multiple of {step}", tensor=entry.name)
        if end > manifest.arena_bytes:
            raise BadHandle(f"{entry.name}: ends at byte {end} of an arena of {manifest.arena_bytes} bytes", tensor=entry.name)
    spans = [(entry.arena_offset, entry.arena_offset + entry.num_bytes, entry.name) for entry in manifest.entries]
    for (_, end, name), (start, _, next_name) in pairwise(sorted(spans)):
        if start < end:
            raise BadHandle(f"{name} and {next_name} overlap in the arena of rank {manifest.rank}", tensor=next_name)


def _check_memory(manifest: Manifest) -> None:
    """Raises BadHandle if the manifest names memory that cannot hold the arena."""
    chunks, ipc, rank, num_bytes = manifest.chunk_bytes, manifest.ipc_memory, manifest.rank, manifest.arena_bytes
    if not manifest.entries or not (manifest.device_uuid or chunks or ipc):
        return
    text = ""
    if ipc is None:
        if not 0 < len(chunks) <= MAX_CHUNKS or min(chunks) < 1 or sum(chunks) < num_bytes:
            text = f"{len(chunks)} chunks of {sum(chunks)} bytes cannot hold an arena of {num_bytes} bytes (1 to {MAX_CHUNKS} chunks)"
    elif chunks or not manifest.device_uuid:
        text = "memory is either an IPC handle on a GPU or chunks"
    elif not _IPC_HANDLE_BYTES <= len(ipc.handle) <= _MAX_NAME or len(ipc.counter) > _MAX_NAME:
        text = f"an IPC handle of {len(ipc.handle)} bytes is truncated or malformed"
    elif ipc.num_bytes < num_bytes:
        text = f"an allocation of {ipc.num_bytes} bytes cannot hold an arena of {num_bytes} bytes"
    if text:
        raise BadHandle(f"rank {rank}: {text}", rank=rank)


def _check_slices(name: str, entries: Sequence[Entry]) -> None:
    shape = entries[0].global_shape
    if any((entry.dtype, entry.global_shape) != (entries[0].dtype, shape) for entry in entries):
        raise BadHandle(f"{name}: trainer ranks disagree about its dtype or shape", tensor=name)
    boxes = [entry.box for entry in entries]
    shared = first_overlap(boxes)
    if shared is not None:
        raise BadHandle(f"{name}: {shared} of shape {shape} is published by two trainer ranks", tensor=name)
    gap = first_gap(boxes, shape)
    if gap is not None:
        raise BadHandle(f"{name}: {gap} of shape {shape} is not published by any trainer rank", tensor=name)
