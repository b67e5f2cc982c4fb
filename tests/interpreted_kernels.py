"""Triton kernels on the CPU, by Triton's interpreter: `python -m tests.interpreted_kernels` ends with 0 if all results are exact.

Triton reads TRITON_INTERPRET when it is imported, so this runs as a process. The interpreter has no inline assembly and multiplies the bits
of bfloat16 matrices: both are replaced.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from tasuki.trainer.backends.fsdp.lora.merge_triton import Merge, MergeTable
from tasuki.weights.checksum import MODULUS, checksum
from tasuki.weights.copies import DeviceCopies, ViewCopy
from tasuki.weights.plan import Slice

CPU, SHAPE = torch.device("cpu"), (37, 264)
FIRST = 80
"""Index of a second tensor's first element in its whole."""
_DOT = interpreter.InterpreterBuilder.create_dot


def _product(instruction: str, _: str, factors: Sequence[Any], **__: Any) -> Any:
    assert instruction == "mul.wide.s32 $0, $1, $2;"
    values = np.multiply(*(factor.handle.data.astype(np.int64) for factor in factors))
    return tl.tensor(interpreter.TensorHandle(values, tl.int64), tl.block_type(tl.int64, list(values.shape)))


def _dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
    return _DOT(self, *(interpreter.TensorHandle(_as_float32(each.data), tl.float32) for each in (a, b)), *others)


def _as_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _is_equal(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.contiguous().view(torch.int16), expected.contiguous().view(torch.int16))


def _where(shape: tuple[int, ...], slot: int) -> Slice:
    return Slice(slot * FIRST, shape, (shape[1], 1))


def _check(copies: DeviceCopies, held: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Two tensors become the expected ones, and their sums are those of what memory holds, also if nothing was written there."""
    before = [each.clone() for each in held]
    with _without_stores():
        copies.start()
    for slot, (each, total) in enumerate(zip(before, copies.sums().tolist(), strict=True)):
        assert _is_equal(held[slot], each) and total == checksum(each, _where(tuple(each.shape), slot))
    copies.start()
    for slot, (each, total) in enumerate(zip(expected, copies.sums().tolist(), strict=True)):
        assert _is_equal(held[slot], each) and total == checksum(each, _where(tuple(each.shape), slot))


@contextlib.contextmanager
def _without_stores() -> Iterator[None]:
    """The kernels' writes are lost."""
    store = interpreter.InterpreterBuilder.create_masked_store
    interpreter.InterpreterBuilder.create_masked_store = lambda *_: None
    try:
        yield
    finally:
        interpreter.InterpreterBuilder.create_masked_store = store


def publications() -> tuple[Tensor, Tensor]:
    """The weights of two publications."""
    old, new = 0.02 * torch.randn(2, *SHAPE)
    return old.bfloat16(), new.bfloat16()


def check_copies(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    expected = [new for _, new in pairs]
    for sources in ([new.float() for new in expected], expected):
        held = [old.clone() for old, _ in pairs]
        copies = [
            ViewCopy(held=one, source=source, where=_where(SHAPE, slot), counted=one.dtype, slot=slot)
            for slot, (one, source) in enumerate(zip(held, sources, strict=True))
        ]
        _check(DeviceCopies(copies, num_sums=2, device=CPU), held, expected)
    views = [ViewCopy(held=new, where=_where(SHAPE, slot), slot=slot) for slot, new in enumerate(expected)]
    summed = DeviceCopies(views, num_sums=2, device=CPU)
    summed.start()
    assert summed.sums().tolist() == [checksum(new, _where(SHAPE, slot)) for slot, new in enumerate(expected)]


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
    pairs = [publications() for _ in range(2)]
    check_copies(pairs)
    check_merge()


if __name__ == "__main__":
    main()
