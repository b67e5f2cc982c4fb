"""Copies that write deltas (deltas.py), and copies that apply them: by torch on a CPU, by one kernel each on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from tasuki.transport.checksum import GROUP
from tasuki.transport.copies import (
    Dtypes,
    SummedCopies,
    ViewChecksum,
    ViewCopy,
    launch,
    prepare_checksums,
    prepare_summed_copies,
    summed_copy_tables,
    summed_types,
)
from tasuki.transport.deltas import UNIT, Deltas, decode, encode
from tasuki.transport.plan import whole
from tasuki.transport.table import TILE_UNITS, Table

_HOST_UNITS = 1 << 17
"""Units that a CPU encodes or decodes at a time."""


def prepare_encoded_copies(copies: Sequence[ViewCopy], deltas: Deltas, *, num_sums: int, device: torch.device) -> SummedCopies:
    """Summed copies that also write to `deltas` by how much each destination moves. Checksums cover the destinations' bit patterns.

    Destinations that consist of no whole units are only copied.
    """
    if device.type == "cuda":
        return DeviceEncodedCopies(copies, deltas, num_sums=num_sums, device=device)
    return HostEncodedCopies(copies, deltas, num_sums=num_sums)


def prepare_applied_deltas(
    copies: Sequence[ViewCopy], deltas: Mapping[int, Deltas], *, num_sums: int, device: torch.device, first_owner: int = 0
) -> SummedCopies:
    """Same result as summed copies, for destinations that hold the previous publication.

    deltas: of the sources, by owner. Sums read the whole destinations. Destinations of other dtypes are copied.
    """
    applied, others = [copy for copy in copies if _applies(copy)], [copy for copy in copies if not _applies(copy)]
    if device.type == "cuda":
        return DeviceAppliedDeltas(applied, others, deltas, num_sums=num_sums, device=device, first_owner=first_owner)
    return HostAppliedDeltas(applied, others, deltas, num_sums=num_sums)


def compile_applied_deltas(dtype: torch.dtype, *, device: torch.device) -> None:
    """Compiles the kernel that applies deltas, by applying empty ones. Does nothing on a CPU or for dtypes other than 2-byte floats."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return
    source, destination = torch.zeros(2, TILE_UNITS * UNIT, dtype=dtype, device=device)
    deltas = Deltas(source.data_ptr(), torch.zeros(TILE_UNITS, dtype=torch.int32, device=device))
    applied = prepare_applied_deltas(
        [ViewCopy(destination, source, where=whole(source.shape))], {0: deltas}, num_sums=1, device=device
    )
    applied.start()
    applied.sums()


def _applies(copy: ViewCopy) -> bool:
    return copy.source.dtype is copy.destination.dtype and copy.source.element_size() == 2


def _parts(copy: ViewCopy) -> Iterator[ViewCopy]:
    """Splits a copy, so that decoding takes little memory."""
    if copy.source.numel() <= _HOST_UNITS * UNIT:
        yield copy
        return
    dim = max(range(copy.source.dim()), key=lambda dim: copy.source.shape[dim])
    for destination, source in zip(copy.destination.tensor_split(2, dim), copy.source.tensor_split(2, dim), strict=True):
        yield from _parts(ViewCopy(destination, source, copy.owner))


class _HostSums:
    """Checksums of all destinations, added up by slot."""

    def __init__(self, copies: Sequence[ViewCopy], *, num_sums: int) -> None:
        self._slots = np.array([copy.slot for copy in copies], dtype=np.intp)
        views = [
            ViewChecksum(copy.destination, copy.where, copy.destination.dtype) for copy in copies if copy.where is not None
        ]
        assert len(views) == len(copies), "copies that are summed"
        self._checksums = prepare_checksums(views, device=torch.device("cpu"))
        self._num_sums = num_sums

    def read(self) -> np.ndarray:
        sums = np.zeros(self._num_sums, dtype=np.uint64)
        np.add.at(sums, self._slots, np.array(self._checksums.read(), dtype=np.uint64))
        return sums


class HostEncodedCopies:
    """One tensor after another."""

    def __init__(self, copies: Sequence[ViewCopy], deltas: Deltas, *, num_sums: int) -> None:
        self._copies = [(copy, deltas.of(copy.destination)) for copy in copies]
        self._sums = _HostSums(copies, num_sums=num_sums)

    @torch.no_grad()
    def start(self) -> None:
        for copy, words in self._copies:
            if words is None:
                copy.destination.copy_(copy.source)
                continue
            old, source = copy.destination.view(-1), copy.source.reshape(-1)
            for first in range(0, len(words), _HOST_UNITS):
                part = slice(first * UNIT, (first + _HOST_UNITS) * UNIT)
                new = source[part].to(old.dtype)
                words[first : first + _HOST_UNITS] = encode(new, old[part])
                old[part] = new

    def sums(self) -> np.ndarray:
        return self._sums.read()


class HostAppliedDeltas:
    """One slice after another; checksums read everything back."""

    def __init__(
        self, applied: Sequence[ViewCopy], others: Sequence[ViewCopy], deltas: Mapping[int, Deltas], *, num_sums: int
    ) -> None:
        parts = [part for copy in applied for part in _parts(copy)]
        self._applied = [(part, *deltas[part.owner].around(part.source)) for part in parts]
        self._sums = _HostSums(applied, num_sums=num_sums)
        self._others = prepare_summed_copies(others, num_sums=num_sums, device=torch.device("cpu"))

    @torch.no_grad()
    def start(self) -> None:
        for copy, words, first in self._applied:
            differences, is_far = (
                decoded.as_strided(copy.source.shape, copy.source.stride(), first) for decoded in decode(words)
            )
            bits = copy.destination.view(torch.int16)
            bits.copy_(torch.where(is_far, copy.source.view(torch.int16), bits + differences))
        self._others.start()

    def sums(self) -> np.ndarray:
        return self._sums.read() + self._others.sums()


class DeviceEncodedCopies:
    """One launch per kind of access; memory without room for vectors is only copied."""

    def __init__(self, copies: Sequence[ViewCopy], deltas: Deltas, *, num_sums: int, device: torch.device) -> None:
        # Keeps the views alive, since the tables contain only addresses.
        self._copies, self._deltas = list(copies), deltas
        self._launches = [
            (table, summed_types(dtypes, table, counted=dtypes[1]), dtypes[1].itemsize == 2 and table.vector == GROUP)
            for dtypes, table in summed_copy_tables(copies, device=device, first_owner=0)
        ]
        self._sums = torch.zeros(num_sums, dtype=torch.int64, device=device)

    def start(self) -> None:
        from tasuki.transport.kernels import copy_and_sum_tiles, encode_and_sum_tiles

        with torch.cuda.device(self._sums.device):
            self._sums.zero_()
            for table, types, is_encoded in self._launches:
                if is_encoded:
                    launch(encode_and_sum_tiles, table, self._deltas.shift, self._sums, **types)
                else:
                    launch(copy_and_sum_tiles, table, self._sums, **types)

    def sums(self) -> np.ndarray:
        return self._sums.cpu().numpy().view(np.uint64)


class DeviceAppliedDeltas:
    """One launch per kind of access; slices that are no vectors, and others, are copied."""

    def __init__(
        self,
        applied: Sequence[ViewCopy],
        others: Sequence[ViewCopy],
        deltas: Mapping[int, Deltas],
        *,
        num_sums: int,
        device: torch.device,
        first_owner: int,
    ) -> None:
        self._copies, self._deltas = [*applied, *others], dict(deltas)
        shifts = torch.zeros(max(deltas) + 1, dtype=torch.int64)
        for owner, each in deltas.items():
            shifts[owner] = each.shift
        of_applied = summed_copy_tables(applied, device=device, first_owner=first_owner)
        of_others = summed_copy_tables(others, device=device, first_owner=first_owner)
        self._applied = [
            (table, shifts[table.lanes].to(device), summed_types(dtypes, table, counted=dtypes[0]))
            for dtypes, table in of_applied
            if table.vector == GROUP
        ]
        whole: list[tuple[Dtypes, Table]] = [*(one for one in of_applied if one[1].vector != GROUP), *of_others]
        self._whole = [(table, summed_types(dtypes, table, counted=dtypes[0])) for dtypes, table in whole]
        self._sums = torch.zeros(num_sums, dtype=torch.int64, device=device)

    def start(self) -> None:
        from tasuki.transport.kernels import apply_and_sum_tiles, copy_and_sum_tiles

        with torch.cuda.device(self._sums.device):
            self._sums.zero_()
            for table, shifts, types in self._applied:
                launch(apply_and_sum_tiles, table, shifts, self._sums, **types)
            for table, types in self._whole:
                launch(copy_and_sum_tiles, table, self._sums, **types)

    def sums(self) -> np.ndarray:
        return self._sums.cpu().numpy().view(np.uint64)
