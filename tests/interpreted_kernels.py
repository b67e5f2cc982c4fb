"""Triton kernels on the CPU, by Triton's interpreter: `python -m tests.interpreted_kernels` ends with 0 if all results are exact.

Triton reads TRITON_INTERPRET when it is imported, so this runs as a process. The interpreter has no inline assembly and multiplies the bits
of bfloat16 matrices: both are replaced.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from tasuki.trainer.backends.fsdp.merge_triton import Merge, MergeTable
from tasuki.transport.checksum import MODULUS, checksum
from tasuki.transport.copies import DeviceChecksums, DeviceSummedCopies, SummedCopies, ViewChecksum, ViewCopy
from tasuki.transport.delta_copies import DeviceAppliedDeltas, DeviceEncodedCopies
from tasuki.transport.deltas import UNIT, Deltas, encode
from tasuki.transport.plan import Slice, whole

CPU, SHAPE = torch.device("cpu"), (37, 264)
_DOT = interpreter.InterpreterBuilder.create_dot


def _product(_: str, __: str, factors: Sequence[Any], **___: Any) -> Any:
    values = np.multiply(*(factor.handle.data.astype(np.int64) for factor in factors))
    return tl.tensor(interpreter.TensorHandle(values, tl.int64), tl.block_type(tl.int64, list(values.shape)))


def _dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
    return _DOT(self, *(interpreter.TensorHandle(_as_float32(each.data), tl.float32) for each in (a, b)), *others)


def _as_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _is_equal(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.contiguous().view(torch.int16), expected.contiguous().view(torch.int16))


def _check(copies: SummedCopies, held: Tensor, expected: Tensor) -> None:
    copies.start()
    assert _is_equal(held, expected)
    assert int(copies.sums()[0]) == checksum(expected, whole(tuple(expected.shape)))


def publications() -> tuple[Tensor, Tensor]:
    """Two publications: most numbers equal, some moved by up to 7 places, a few further."""
    old = (0.02 * torch.randn(SHAPE)).bfloat16()
    bits = old.clone().view(torch.int16)
    near, far = torch.rand(SHAPE) < 0.04, torch.rand(SHAPE) < 0.003
    bits[near] += torch.randint(-7, 8, (int(near.sum()),), dtype=torch.int16)
    bits[far] += 300
    return old, bits.view(torch.bfloat16)


def check_copies(old: Tensor, new: Tensor) -> None:
    for source in (new.float(), new):
        held = old.clone()
        copy = ViewCopy(held, source, where=whole(SHAPE), slot=0)
        _check(DeviceSummedCopies([copy], num_sums=1, device=CPU, counts_destinations=True), held, new)
    (found,) = DeviceChecksums([ViewChecksum(new, whole(SHAPE), torch.bfloat16)], device=CPU).read()
    assert found == checksum(new, whole(SHAPE))


def check_deltas(old: Tensor, new: Tensor) -> None:
    words = encode(new.view(-1), old.view(-1))
    for source in (new.float(), new):
        held = old.clone()
        found = Deltas(held.data_ptr(), torch.zeros(held.numel() // UNIT, dtype=torch.int32))
        copy = ViewCopy(held, source, where=whole(SHAPE), slot=0)
        _check(DeviceEncodedCopies([copy], found, num_sums=1, device=CPU), held, new)
        assert torch.equal(found.words, words)
    for columns in (SHAPE[1], 128):
        held, source = old[:, :columns].clone(), new[:, :columns]
        copy = ViewCopy(held, source, where=whole((SHAPE[0], columns)), slot=0)
        deltas = {0: Deltas(new.data_ptr(), words)}
        _check(DeviceAppliedDeltas([copy], [], deltas, num_sums=1, device=CPU, first_owner=0), held, source)


def check_merge() -> None:
    shapes = [(70, 72), (3, 136)]
    columns = 0.1 * torch.randn(32, sum(shape[1] for shape in shapes))
    merges: list[Merge] = []
    for slot, shape in enumerate(shapes):
        base, rows = (0.02 * torch.randn(shape)).bfloat16(), 0.1 * torch.randn(shape[0], 32)
        first, where = sum(each[1] for each in shapes[:slot]), Slice(8 * shape[1], shape, (shape[1], 1))
        merges.append(Merge(torch.zeros_like(base), base, rows, first, where, slot))
    sums = torch.zeros(len(shapes), dtype=torch.int64)
    MergeTable(merges).start(columns, sums, scaling=2.0)
    for each, total in zip(merges, sums.tolist(), strict=True):
        part = columns[:, each.first_column :][:, : each.base.shape[1]]
        exact = each.base.double() + 2.0 * each.rows.double() @ part.double()
        # The interpreter truncates to bfloat16, where a GPU rounds.
        assert ((each.held.double() - exact).abs() <= exact.abs() * 2**-7 * 1.01 + 1e-6).all()
        assert total % MODULUS == checksum(each.held, each.where)


def main() -> None:
    tl.inline_asm_elementwise = _product
    interpreter.InterpreterBuilder.create_dot = _dot
    torch.cuda.device = lambda _: contextlib.nullcontext()
    torch.manual_seed(0)
    old, new = publications()
    check_copies(old, new)
    check_deltas(old, new)
    check_merge()


if __name__ == "__main__":
    main()
