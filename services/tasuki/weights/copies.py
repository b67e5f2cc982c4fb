"""Copies and checksums of many tensors, prepared once and run at every sync: by csrc on a CPU, by one kernel each on a GPU."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from tasuki.memory.arena import call
from tasuki.memory.host import host_cores
from tasuki.weights.checksum import GROUP, checksum
from tasuki.weights.plan import Slice, whole
from tasuki.weights.table import TILE_UNITS, Side, Table, Transfer, blocks_of, build_tables, memory_side

_NUM_WARPS = 4
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_STRIDES = "source_row source_column held_row held_column index_row index_column"
_BLOCK = np.dtype(
    [(name, "<u8") for name in ("source", "held", "rows", "columns")]
    + [(name, "<i8") for name in _STRIDES.split()]
    + [("index", "<u8"), ("slot", "<u4"), ("item_bytes", "<u4")]
)
"""csrc's tasuki_block."""


class Dtypes(NamedTuple):
    source: torch.dtype | None
    held: torch.dtype
    counted: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewCopy:
    """A copy between views of equal shape, and the checksum of what `held` has then; without a source the checksum alone.

    where: the elements' indices in the whole tensor, in the same shape. counted: dtype of the bit patterns; by default the source's, or
    that of `held` without one. slot: index of the sum. owner: the trainer rank whose memory holds the source.
    """

    held: torch.Tensor
    source: torch.Tensor | None = None
    where: Slice
    counted: torch.dtype | None = None
    slot: int = 0
    owner: int = 0

    @property
    def dtypes(self) -> Dtypes:
        source = None if self.source is None else self.source.dtype
        return Dtypes(source, self.held.dtype, self.counted or source or self.held.dtype)


def prepare_copies(
    copies: Sequence[ViewCopy], *, num_sums: int, device: torch.device, first_owner: int = 0
) -> "HostCopies | DeviceCopies":
    """first_owner: whose memory is read first; ranks that read concurrently pass different ones."""
    if device.type == "cpu":
        return HostCopies(copies, num_sums=num_sums)
    return DeviceCopies(copies, num_sums=num_sums, device=device, first_owner=first_owner)


def compile_copies(dtype: torch.dtype, *, device: torch.device) -> None:
    """Compiles the kernels that sync weights of `dtype`, by copying and summing a few. Does nothing on a CPU or for non-float dtypes."""
    if device.type != "cuda" or dtype not in _FLOATS:
        return
    source, held = torch.zeros(2, TILE_UNITS * GROUP, dtype=dtype, device=device)
    where = whole(source.shape)
    for copy in (ViewCopy(held=held, source=source, where=where), ViewCopy(held=held, where=where)):
        copies = DeviceCopies([copy], num_sums=1, device=device)
        copies.start()
        copies.sums()


class HostCopies:
    """All in one pass over the bytes on every core. torch copies what is cast before; Python sums what counts in another dtype after."""

    def __init__(self, copies: Sequence[ViewCopy], *, num_sums: int) -> None:
        # Keeps the views alive, since the blocks contain only addresses.
        self._copies = list(copies)
        self._by_torch: list[ViewCopy] = []
        self._cast: list[ViewCopy] = []
        transfers: list[Transfer] = []
        for copy in copies:
            source, held, counted = copy.dtypes
            is_by_torch = source is not None and {source, counted} != {held}
            if is_by_torch:
                self._by_torch.append(copy)
            if counted != held:
                self._cast.append(copy)
            else:
                transfers.append(_transfer(replace(copy, source=None) if is_by_torch else copy, alignment=1))
        self._blocks = np.array([_block(block) for block in blocks_of(transfers)], dtype=_BLOCK)
        self._sums = np.zeros(num_sums, dtype=np.uint64)

    @torch.no_grad()
    def start(self) -> None:
        for copy in self._by_torch:
            assert copy.source is not None
            copy.held.copy_(copy.source)
        self._sums = np.zeros_like(self._sums)
        if len(self._blocks):
            places = self._blocks.ctypes.data, len(self._blocks), self._sums.ctypes.data, len(self._sums)
            call("copy_and_sum", *places, host_cores(), device="cpu")
        for copy in self._cast:
            self._sums[copy.slot] += np.uint64(checksum(copy.held, copy.where, dtype=copy.dtypes.counted))

    def sums(self) -> np.ndarray:
        """Checksums by slot, uint64, as of the last start."""
        return self._sums


def _block(transfer: Transfer) -> tuple[int, ...]:
    *source, held, indices = transfer.sides
    start, strides = (source[0].start, source[0].strides) if source else (0, (0, 0))
    places = (start, held.start, *transfer.shape, *strides, *held.strides, *indices.strides, indices.start)
    return (*places, transfer.slot, held.item_bytes)


class DeviceCopies:
    """One launch per set of dtypes and kind of access: usually one in all. The kernel reads back and sums what it has just written."""

    def __init__(self, copies: Sequence[ViewCopy], *, num_sums: int, device: torch.device, first_owner: int = 0) -> None:
        # Keeps the views alive, since the tables contain only addresses.
        self._copies = list(copies)
        self._tables = copy_tables(copies, device=device, first_owner=first_owner)
        self._sums = torch.zeros(num_sums, dtype=torch.int64, device=device)

    def start(self) -> None:
        """Starts all after the current stream's work."""
        with torch.cuda.device(self._sums.device):
            self._sums.zero_()
            for dtypes, table in self._tables:
                _launch(dtypes, table, self._sums)

    def sums(self) -> np.ndarray:
        """Checksums by slot, uint64, as of the last start; waits for it."""
        return self._sums.cpu().numpy().view(np.uint64)


def copy_tables(copies: Sequence[ViewCopy], *, device: torch.device, first_owner: int) -> list[tuple[Dtypes, Table]]:
    """Tables per set of dtypes; a unit is a checksum's group of elements."""
    by_dtypes: defaultdict[Dtypes, list[Transfer]] = defaultdict(list)
    for copy in copies:
        by_dtypes[copy.dtypes].append(_transfer(copy, alignment=GROUP))
    return [
        (dtypes, Table(table.vector, table.blocks.to(device), table.tiles.to(device)))
        for dtypes, alike in by_dtypes.items()
        for table in build_tables(alike, first_lane=first_owner)
    ]


def _transfer(copy: ViewCopy, *, alignment: int) -> Transfer:
    held, indices = memory_side(copy.held), Side(copy.where.offset, copy.where.strides, item_bytes=1, alignment=alignment)
    if copy.source is None:
        return Transfer(copy.where.shape, held, indices, slot=copy.slot)
    return Transfer(copy.where.shape, memory_side(copy.source), held, slot=copy.slot, lane=copy.owner, indices=indices)


def _launch(dtypes: Dtypes, table: Table, sums: torch.Tensor) -> None:
    """Runs a kernel on every tile of a table, on the current device. Plain bit patterns where nothing is cast."""
    from tasuki.weights.kernels import copy_and_sum_tiles, sum_tiles

    source, held, counted = dtypes
    bits = _bits(counted)
    is_counted_as_held = source in (None, held) and counted == held
    kernel: Any
    types = {"BITS": bits, "CAST": bits if is_counted_as_held else _float(counted)}
    if source is None:
        kernel, types["HELD"] = sum_tiles, bits if is_counted_as_held else _float(held)
    else:
        kernel, types["WORDS"] = copy_and_sum_tiles, table.blocks.shape[1]
        types["SOURCE"], types["DESTINATION"] = (_bits(source),) * 2 if source == held else (_float(source), _float(held))
    units = {"VECTOR": table.vector, "UNITS": TILE_UNITS}
    kernel[(len(table.tiles),)](table.blocks, table.tiles, sums, **types, **units, num_warps=_NUM_WARPS)


def _bits(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {2: tl.int16, 4: tl.int32}[dtype.itemsize]


def _float(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]
