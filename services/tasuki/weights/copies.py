"""Copies and checksums of many tensors, prepared once and run at every sync: by torch on a CPU, by one kernel each on a GPU."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tasuki.memory.arena import call
from tasuki.memory.host import host_cores
from tasuki.weights.checksum import GROUP, MODULUS, checksum
from tasuki.weights.plan import Slice, whole
from tasuki.weights.table import TILE_UNITS, VECTOR_BYTES, Side, Table, Transfer, blocks_of, build_tables, memory_side

_NUM_WARPS = 4
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_STRIDES = "source_row source_column held_row held_column index_row index_column"
_BLOCK = np.dtype(
    [(name, "<u8") for name in ("source", "held", "rows", "columns")]
    + [(name, "<i8") for name in _STRIDES.split()]
    + [("index", "<u8"), ("slot", "<u4"), ("item_bytes", "<u4")]
)
"""csrc's tasuki_block."""


@dataclass(frozen=True, slots=True)
class ViewCopy:
    """A copy between views of equal shape. owner: the trainer rank whose memory holds the source.

    For summed copies, where: the elements' indices in the whole tensor, in the same shape; slot: index of the sum.
    """

    destination: torch.Tensor
    source: torch.Tensor
    owner: int = 0
    where: Slice | None = None
    slot: int = 0


@dataclass(frozen=True, slots=True)
class ViewChecksum:
    """The checksum of a view. `where` has its elements' indices; `dtype` is that of the bit patterns."""

    values: torch.Tensor
    where: Slice
    dtype: torch.dtype


def prepare_copies(copies: Sequence[ViewCopy], *, device: torch.device, first_owner: int = 0) -> "HostCopies | DeviceCopies":
    """first_owner: whose memory is read first; ranks that read concurrently pass different ones."""
    return DeviceCopies(copies, device=device, first_owner=first_owner) if device.type == "cuda" else HostCopies(copies)


def prepare_summed_copies(
    copies: Sequence[ViewCopy],
    *,
    num_sums: int,
    device: torch.device,
    first_owner: int = 0,
    counts_destinations: bool = False,
) -> "HostSummedCopies | DeviceSummedCopies":
    """Checksums cover the bit patterns of the sources' dtype or, with counts_destinations, the destinations'."""
    if device.type == "cpu":
        return HostSummedCopies(copies, num_sums=num_sums, counts_destinations=counts_destinations)
    return DeviceSummedCopies(
        copies, num_sums=num_sums, device=device, first_owner=first_owner, counts_destinations=counts_destinations
    )


def prepare_checksums(views: Sequence[ViewChecksum], *, device: torch.device) -> "HostChecksums | DeviceChecksums":
    return DeviceChecksums(views, device=device) if device.type == "cuda" else HostChecksums(views)


def compile_copies(dtype: torch.dtype, *, device: torch.device) -> None:
    """Compiles the kernels that sync weights of `dtype`, by copying and summing a few. Does nothing on a CPU or for non-float dtypes."""
    if device.type != "cuda" or dtype not in _FLOATS:
        return
    source, destination = torch.zeros(2, TILE_UNITS * GROUP, dtype=dtype, device=device)
    at = whole(source.shape)
    copies = prepare_summed_copies([ViewCopy(destination, source, where=at)], num_sums=1, device=device)
    copies.start()
    copies.sums()
    prepare_checksums([ViewChecksum(destination, at, dtype)], device=device).read()


class HostCopies:
    """One `copy_` after another."""

    def __init__(self, copies: Sequence[ViewCopy]) -> None:
        self._copies = list(copies)

    @torch.no_grad()
    def start(self) -> None:
        for copy in self._copies:
            copy.destination.copy_(copy.source)


class HostSummedCopies:
    """All in one pass over the bytes on every core; separate `copy_` and `checksum` calls where dtypes differ."""

    def __init__(self, copies: Sequence[ViewCopy], *, num_sums: int, counts_destinations: bool = False) -> None:
        # Keeps the views alive, since the blocks contain only addresses.
        self._copies, self._counts_destinations = list(copies), counts_destinations
        self._cast = [copy for copy in copies if copy.source.dtype != copy.destination.dtype]
        alike = (copy for copy in copies if copy.source.dtype == copy.destination.dtype)
        self._blocks = _host_blocks(_summed_transfer(copy, alignment=1) for copy in alike)
        self._sums = np.zeros(num_sums, dtype=np.uint64)

    @torch.no_grad()
    def start(self) -> None:
        self._sums = _copy_and_sum(self._blocks, num_sums=len(self._sums))
        for copy in self._cast:
            copy.destination.copy_(copy.source)
            assert copy.where is not None, "a copy that is summed"
            counted = copy.destination.dtype if self._counts_destinations else copy.source.dtype
            held = checksum(copy.destination, copy.where, dtype=counted)
            self._sums[copy.slot] += np.uint64(held)

    def sums(self) -> np.ndarray:
        """Checksums by slot, uint64, of the copies last started."""
        return self._sums


class HostChecksums:
    """All in one pass over the bytes on every core; separate `checksum` calls where dtypes differ."""

    def __init__(self, views: Sequence[ViewChecksum]) -> None:
        self._views = list(views)
        self._cast = [(slot, view) for slot, view in enumerate(views) if view.values.dtype != view.dtype]
        held = ((slot, view) for slot, view in enumerate(views) if view.values.dtype == view.dtype)
        self._blocks = _host_blocks(_summed_view(view, slot, alignment=1) for slot, view in held)

    @torch.no_grad()
    def read(self) -> list[int]:
        sums = _copy_and_sum(self._blocks, num_sums=len(self._views)).tolist()
        for slot, view in self._cast:
            sums[slot] = checksum(view.values, view.where, dtype=view.dtype)
        return sums


def _host_blocks(transfers: Iterable[Transfer]) -> np.ndarray:
    """Blocks of summed copies or of views to sum. They contain addresses, so the caller must keep the views alive."""
    rows: list[tuple[int, ...]] = []
    for block in blocks_of(transfers):
        *source, held, indices = block.sides
        start, strides = (source[0].start, source[0].strides) if source else (0, (0, 0))
        places = (start, held.start, *block.shape, *strides, *held.strides, *indices.strides, indices.start)
        rows.append((*places, block.slot, held.item_bytes))
    return np.array(rows, dtype=_BLOCK)


def _copy_and_sum(blocks: np.ndarray, *, num_sums: int) -> np.ndarray:
    """Runs the copies. Returns checksums of the destinations by slot, uint64."""
    sums = np.zeros(num_sums, dtype=np.uint64)
    if len(blocks):
        call("copy_and_sum", blocks.ctypes.data, len(blocks), sums.ctypes.data, num_sums, host_cores(), device="cpu")
    return sums


class DeviceCopies:
    """One launch per pair of dtypes and kind of access: usually one in all."""

    def __init__(self, copies: Sequence[ViewCopy], *, device: torch.device, first_owner: int = 0) -> None:
        # Keeps the views alive, since the tables contain only addresses.
        self._copies = list(copies)
        self._launches = [
            (table, *copy_types(*dtypes)) for dtypes, table in copy_tables(copies, device=device, first_owner=first_owner)
        ]
        self._device = device

    def start(self) -> None:
        """Starts all copies after the current stream's work."""
        from tasuki.weights.kernels import copy_tiles

        with torch.cuda.device(self._device):
            for table, source, destination in self._launches:
                launch(copy_tiles, table, SOURCE=source, DESTINATION=destination)


class DeviceSummedCopies:
    """Same as DeviceCopies, with a kernel that reads back and sums what it has just written."""

    def __init__(
        self,
        copies: Sequence[ViewCopy],
        *,
        num_sums: int,
        device: torch.device,
        first_owner: int = 0,
        counts_destinations: bool = False,
    ) -> None:
        self._copies = list(copies)
        self._launches = [
            (table, summed_types(dtypes, table, counted=dtypes[counts_destinations]))
            for dtypes, table in summed_copy_tables(copies, device=device, first_owner=first_owner)
        ]
        self._sums = torch.zeros(num_sums, dtype=torch.int64, device=device)

    def start(self) -> None:
        """Starts all copies after the current stream's work."""
        from tasuki.weights.kernels import copy_and_sum_tiles

        with torch.cuda.device(self._sums.device):
            self._sums.zero_()
            for table, types in self._launches:
                launch(copy_and_sum_tiles, table, self._sums, **types)

    def sums(self) -> np.ndarray:
        """Checksums by slot, uint64, of the copies last started; waits for them."""
        return self._sums.cpu().numpy().view(np.uint64)


class DeviceChecksums:
    """One launch per dtype and kind of access, and one transfer of all sums."""

    def __init__(self, views: Sequence[ViewChecksum], *, device: torch.device) -> None:
        self._views = list(views)
        self._launches = [(table, *sum_types(*dtypes)) for dtypes, table in checksum_tables(views, device=device)]
        self._sums = torch.zeros(len(views), dtype=torch.int64, device=device)

    def read(self) -> list[int]:
        """Checksums of the current memory; waits for started copies."""
        from tasuki.weights.kernels import sum_tiles

        with torch.cuda.device(self._sums.device):
            self._sums.zero_()
            for table, held, bits, cast in self._launches:
                launch(sum_tiles, table, self._sums, HELD=held, BITS=bits, CAST=cast)
            return [value % MODULUS for value in self._sums.tolist()]


Dtypes = tuple[torch.dtype, torch.dtype]


def copy_tables(copies: Sequence[ViewCopy], *, device: torch.device, first_owner: int) -> list[tuple[Dtypes, Table]]:
    """Tables per pair of source and destination dtype; a unit is 16 bytes of the smaller one."""
    sides = ((memory_side(copy.source), memory_side(copy.destination)) for copy in copies)
    transfers = (
        Transfer(tuple(copy.destination.shape), *both, lane=copy.owner) for copy, both in zip(copies, sides, strict=True)
    )
    return _tables(zip(map(_dtypes, copies), transfers, strict=True), device=device, first_owner=first_owner)


def summed_copy_tables(copies: Sequence[ViewCopy], *, device: torch.device, first_owner: int) -> list[tuple[Dtypes, Table]]:
    """The same for summed copies; a unit is a checksum's group of elements."""
    transfers = (_summed_transfer(copy, alignment=GROUP) for copy in copies)
    return _tables(zip(map(_dtypes, copies), transfers, strict=True), vector=GROUP, device=device, first_owner=first_owner)


def checksum_tables(views: Sequence[ViewChecksum], *, device: torch.device) -> list[tuple[Dtypes, Table]]:
    """Tables per pair of stored and counted dtype; the slot is the view's index."""
    dtypes = ((view.values.dtype, view.dtype) for view in views)
    transfers = (_summed_view(view, slot, alignment=GROUP) for slot, view in enumerate(views))
    return _tables(zip(dtypes, transfers, strict=True), vector=GROUP, device=device)


def _tables(
    transfers: Iterable[tuple[Dtypes, Transfer]], *, device: torch.device, vector: int | None = None, first_owner: int = 0
) -> list[tuple[Dtypes, Table]]:
    by_dtypes: defaultdict[Dtypes, list[Transfer]] = defaultdict(list)
    for dtypes, transfer in transfers:
        by_dtypes[dtypes].append(transfer)
    return [
        (dtypes, Table(table.vector, table.blocks.to(device), table.tiles.to(device)))
        for dtypes, alike in by_dtypes.items()
        for table in build_tables(
            alike, vector=vector or VECTOR_BYTES // min(dtype.itemsize for dtype in dtypes), first_lane=first_owner
        )
    ]


def _dtypes(copy: ViewCopy) -> Dtypes:
    return copy.source.dtype, copy.destination.dtype


def _summed_transfer(copy: ViewCopy, *, alignment: int) -> Transfer:
    assert copy.where is not None, "a copy that is summed"
    indices = _index_side(copy.where, alignment)
    sides = memory_side(copy.source), memory_side(copy.destination)
    return Transfer(tuple(copy.destination.shape), *sides, slot=copy.slot, lane=copy.owner, indices=indices)


def _summed_view(view: ViewChecksum, slot: int, *, alignment: int) -> Transfer:
    return Transfer(view.where.shape, memory_side(view.values), _index_side(view.where, alignment), slot=slot)


def _index_side(where: Slice, alignment: int) -> Side:
    return Side(where.offset, where.strides, item_bytes=1, alignment=alignment)


def copy_types(source: torch.dtype, destination: torch.dtype) -> tuple[Any, Any]:
    """Types of a copy; plain bit patterns if nothing is cast."""
    return (_bits(source), _bits(source)) if source == destination else (_float(source), _float(destination))


def summed_types(dtypes: Dtypes, table: Table, *, counted: torch.dtype) -> dict[str, Any]:
    """Types of a summed copy, and the words of its blocks. counted: dtype of the bit patterns."""
    source, destination = copy_types(*dtypes)
    bits = _bits(counted)
    cast = bits if dtypes[0] == dtypes[1] else _float(counted)
    return {"SOURCE": source, "DESTINATION": destination, "BITS": bits, "CAST": cast, "WORDS": table.blocks.shape[1]}


def sum_types(held: torch.dtype, counted: torch.dtype) -> tuple[Any, Any, Any]:
    """Type to read, type of the bit patterns, and type whose bit patterns are counted."""
    bits = _bits(counted)
    return (bits, bits, bits) if held == counted else (_float(held), bits, _float(counted))


def _bits(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {2: tl.int16, 4: tl.int32}[dtype.itemsize]


def _float(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


def launch(kernel: Any, table: Table, *arguments: torch.Tensor, **types: Any) -> None:
    """Runs a kernel on every tile of a table, on the current device."""
    grid = (len(table.tiles),)
    kernel[grid](table.blocks, table.tiles, *arguments, **types, VECTOR=table.vector, UNITS=TILE_UNITS, num_warps=_NUM_WARPS)
