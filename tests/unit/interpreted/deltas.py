"""Kernels that write and apply deltas against plain torch, run by Triton's interpreter on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tasuki.transport.copies import DeviceSummedCopies, HostSummedCopies, ViewCopy
from tasuki.transport.delta_copies import (
    DeviceAppliedDeltas,
    DeviceEncodedCopies,
    HostAppliedDeltas,
    HostEncodedCopies,
)
from tasuki.transport.deltas import FAR, UNIT, Deltas
from tasuki.transport.plan import Slice, whole
from tests.drifting import drifted

CPU = torch.device("cpu")
SHAPES = [(40, 64), (3, 2000), (5,), (9, 77)]


class Published:
    """A rank's copies, one after another in one block, and their words."""

    def __init__(self) -> None:
        sizes = [-(-torch.Size(shape).numel() // 128) * 128 for shape in SHAPES]
        self.block = torch.zeros(sum(sizes), dtype=torch.bfloat16)
        starts = np.cumsum([0, *sizes])
        self.tensors = [
            self.block[start : start + torch.Size(shape).numel()].view(shape)
            for start, shape in zip(starts, SHAPES, strict=False)
        ]
        self.deltas = Deltas(self.block.data_ptr(), torch.full((len(self.block) // UNIT,), FAR, dtype=torch.int32))

    def views(self, sources: Sequence[torch.Tensor]) -> list[ViewCopy]:
        return [
            ViewCopy(held, source, where=whole(held.shape, offset=1000 * slot), slot=slot)
            for slot, (held, source) in enumerate(zip(self.tensors, sources, strict=True))
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_encoding_kernel_is_plain_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, plain = Published(), Published()
    # Numbers that need no rounding: the interpreter cuts off where a GPU rounds.
    trained = [torch.randn(shape).bfloat16().to(dtype) for shape in SHAPES]
    sums: list[list[int]] = []
    for _ in range(3):
        for one, kind in ((ours, DeviceEncodedCopies), (plain, HostEncodedCopies)):
            arguments = {"device": CPU} if kind is DeviceEncodedCopies else {}
            encoded = kind(one.views(trained), one.deltas, num_sums=len(SHAPES), **arguments)
            encoded.start()
            sums.append(encoded.sums().tolist())
        assert sums[-1] == sums[-2]
        assert torch.equal(ours.block, plain.block) and torch.equal(ours.deltas.words, plain.deltas.words)
        trained = [drifted(tensor).bfloat16().to(dtype) for tensor in trained]
    assert 0.05 < (ours.deltas.words == 0).float().mean() < 0.95


def slices() -> Sequence[tuple[int, Slice]]:
    """Tensor and part: whole, rows, columns, and an awkward start."""
    return [
        (0, whole((40, 64))), (1, whole((3, 2000))), (2, whole((5,))), (3, whole((9, 77))),
        (0, Slice(64 * 8, (16, 64), (64, 1))), (0, Slice(16, (40, 32), (64, 1))), (1, Slice(3, (3, 500), (2000, 1))),
    ]  # fmt: skip


def test_applying_kernel_is_plain_torch_and_a_whole_copy() -> None:
    torch.manual_seed(0)
    published = Published()
    trained = [torch.randn(shape) for shape in SHAPES]
    encoded = HostEncodedCopies(published.views(trained), published.deltas, num_sums=len(SHAPES))
    encoded.start()
    sources = [
        (tensor := published.tensors[index]).as_strided(at.shape, at.strides, tensor.storage_offset() + at.offset)
        for index, at in slices()
    ]
    held = [[source.clone() for source in sources] for _ in range(2)]
    for tensor in trained:
        tensor.copy_(drifted(tensor))
    encoded.start()
    num_sums = len(sources)
    sums = []
    for kind, destinations in zip((DeviceAppliedDeltas, HostAppliedDeltas), held, strict=True):
        views = [
            ViewCopy(destination, source, owner=1, where=at, slot=slot)
            for slot, (destination, source, (_, at)) in enumerate(zip(destinations, sources, slices(), strict=True))
        ]
        arguments = {"device": CPU, "first_owner": 0} if kind is DeviceAppliedDeltas else {}
        applied = kind(views, [], {1: published.deltas}, num_sums=num_sums, **arguments)
        applied.start()
        sums.append(applied.sums().tolist())
        for source, destination in zip(sources, destinations, strict=True):
            assert torch.equal(destination.view(torch.int16), source.view(torch.int16))
    assert sums[0] == sums[1]


@pytest.mark.parametrize("counts_destinations", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
def test_summing_kernel_is_plain_torch(dtypes: tuple[torch.dtype, torch.dtype], counts_destinations: bool) -> None:
    torch.manual_seed(0)
    trained = [torch.randn(shape).bfloat16().to(dtypes[0]) for shape in SHAPES]
    sums = []
    for kind in (DeviceSummedCopies, HostSummedCopies):
        published = Published()
        arguments = {"device": CPU} if kind is DeviceSummedCopies else {}
        copies = kind(published.views(trained), num_sums=len(SHAPES), counts_destinations=counts_destinations, **arguments)
        copies.start()
        sums.append(copies.sums().tolist())
        for held, source in zip(published.tensors, trained, strict=True):
            assert torch.equal(held, source.bfloat16())
    assert sums[0] == sums[1]


def test_each_owner_has_its_own_words() -> None:
    """Shards of three owners, of columns: words lie apart from their copies by another distance for each."""
    torch.manual_seed(0)
    whole_tensor = torch.randn(24, 96).bfloat16()
    moved = drifted(whole_tensor.float()).bfloat16()
    held = [whole_tensor.clone() for _ in range(2)]
    sums = []
    parts: dict[int, torch.Tensor] = {}
    deltas: dict[int, Deltas] = {}
    for owner in range(3):
        columns = slice(32 * owner, 32 * owner + 32)
        parts[owner] = whole_tensor[:, columns].contiguous()
        deltas[owner] = Deltas(parts[owner].data_ptr(), torch.full((parts[owner].numel() // UNIT,), FAR, dtype=torch.int32))
        copy = ViewCopy(parts[owner], moved[:, columns].contiguous(), where=whole(parts[owner].shape))
        HostEncodedCopies([copy], deltas[owner], num_sums=1).start()
    assert len({one.shift for one in deltas.values()}) == 3
    for kind, destination in zip((DeviceAppliedDeltas, HostAppliedDeltas), held, strict=True):
        views = [
            ViewCopy(destination[:, 32 * owner : 32 * owner + 32], parts[owner], owner, Slice(32 * owner, (24, 32), (96, 1)))
            for owner in parts
        ]
        arguments = {"device": CPU, "first_owner": 0} if kind is DeviceAppliedDeltas else {}
        applied = kind(views, [], deltas, num_sums=1, **arguments)
        applied.start()
        sums.append(applied.sums().tolist())
        assert torch.equal(destination.view(torch.int16), moved.view(torch.int16))
    assert sums[0] == sums[1]


@pytest.mark.parametrize("moved", [-8, -7, 7, 8, 2**15 - 1, -(2**15)])
def test_encoding_kernel_marks_what_moved_too_far(moved: int) -> None:
    old = torch.arange(-64, 64, dtype=torch.int16) * 300
    held = old.clone().view(torch.bfloat16)
    new = old.clone()
    new[::8] += moved  # wraps
    words = torch.full((len(old) // UNIT,), 5, dtype=torch.int32)
    deltas = Deltas(held.data_ptr(), words)
    copy = ViewCopy(held, new.view(torch.bfloat16), where=whole(held.shape))
    DeviceEncodedCopies([copy], deltas, num_sums=1, device=CPU).start()
    assert (words == FAR).all() == (abs(moved) > 7)
    assert torch.equal(held.view(torch.int16), new)
