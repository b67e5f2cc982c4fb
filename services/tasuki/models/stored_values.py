"""The values of stored tensors: what a look at some of their bytes tells."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, BinaryIO

from tasuki.wire.errors import InvalidArgument
from tasuki.wire.regular_file import open_regular

if TYPE_CHECKING:
    from tasuki.models.stored_tensors import StoredTensor

BLOCK_BYTES = 1 << 20
_MIN_BLOCK_BYTES, _MIN_ZEROS = 4096, 64
_NUM_SAMPLED, _MIN_SAMPLE = 64, 1024
_OTHER = {"F16": "BF16", "BF16": "F16"}


def check_written(file: Path, tensors: Mapping[str, "StoredTensor"], *, key: str) -> None:
    """Raises InvalidArgument naming a tensor that a download has not written: the file has its whole size, and zeros in it.

    Looks at the file's end and its holes. A single matrix that is zero, or has rows of zeros, may be meant so, as the padding of a
    vocabulary or a layer that starts without effect; so may vectors.
    """
    matrices = {name: tensor for name, tensor in tensors.items() if len(tensor.shape) > 1 and tensor.num_bytes}
    start = min((tensor.offset for tensor in matrices.values()), default=0)
    with open_regular(file) as opened:
        end = os.fstat(opened.fileno()).st_size
        for first, last in [(end, end), *_holes(opened.fileno(), start, end)]:
            first, last = _zeros(opened.fileno(), first, last, start=start, end=end)
            parts = {
                name: (max(first - one.offset, 0), min(last - one.offset, one.num_bytes)) for name, one in matrices.items()
            }
            hit = {name: part for name, part in parts.items() if part[1] - part[0] >= _MIN_ZEROS}
            for name, (begin, stop) in hit.items():
                row = matrices[name].num_bytes // matrices[name].shape[0]
                if len(hit) > 1 or begin % row or stop % row:
                    problem = f"{name} is zero from its byte {begin} on, so the file was not written to its end"
                    raise InvalidArgument(key, f"{file}: {problem}; download it again")


def _holes(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Parts of a file that have never been written, where the file system tells."""
    with suppress(OSError):
        while (first := os.lseek(fd, start, os.SEEK_HOLE)) < end:
            try:
                start = os.lseek(fd, first, os.SEEK_DATA)
            except OSError:  # none after it
                start = end
            yield first, start


def _zeros(fd: int, first: int, last: int, *, start: int, end: int) -> tuple[int, int]:
    """Widens a part of zeros to all zeros around it, within start to end."""
    size = _MIN_BLOCK_BYTES
    while first > start:
        block = os.pread(fd, min(size, first - start), first - min(size, first - start))
        first -= len(block) - len(block.rstrip(b"\0"))
        if block.strip(b"\0"):
            break
        size = min(2 * size, BLOCK_BYTES)
    while last < end and (block := os.pread(fd, min(_MIN_BLOCK_BYTES, end - last), last)):
        last += len(block) - len(block.lstrip(b"\0"))
        if block.strip(b"\0"):
            break
    return first, last


def check_dtypes(tensors: Mapping[str, "StoredTensor"], *, key: str) -> None:
    """Raises InvalidArgument for a matrix of F16 whose bytes are surely BF16, or the other way round: a header that another tool wrote.

    Looks at three blocks of some 64 matrices, among them one of each file and dtype.
    """
    of_kind: dict[tuple[Path, str], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.dtype in _OTHER and len(tensor.shape) > 1 and tensor.num_bytes >= _MIN_BLOCK_BYTES:
            of_kind.setdefault((tensor.file, tensor.dtype), []).append(name)
    for (file, dtype), names in of_kind.items():
        with open_regular(file) as opened:
            for name in names[:: -(-len(names) * len(of_kind) // _NUM_SAMPLED)]:
                last = tensors[name].num_bytes - _MIN_BLOCK_BYTES
                starts = sorted({0, last // 4 * 2, last})
                blocks = [os.pread(opened.fileno(), _MIN_BLOCK_BYTES, tensors[name].offset + start) for start in starts]
                if _is_misread(memoryview(b"".join(blocks)).cast("H"), dtype):
                    problem = f"{name} is {dtype} by the header, but its values are {_OTHER[dtype]}"
                    raise InvalidArgument(key, f"{file}: {problem}; convert the model again")


def _is_misread(values: Sequence[int], dtype: str) -> bool:
    """Whether no weights have these bits in this dtype. Weights lie around 0, without a gap there.

    Bits 0x3400 are 0.25 in F16 and 1e-7 in BF16, 0x4400 are 4 and 512: with all between, BF16 has weights and F16 the gap. Below them F16
    has weights, and BF16 values of no effect of which neighbors differ by more than a factor of 16.
    """
    bits = [one for one in values if one & 0x7FFF]
    if len(bits) < _MIN_SAMPLE or not 0.25 < sum(one >> 15 for one in bits) / len(bits) < 0.75:
        return False
    sizes = [one & 0x7FFF for one in bits]
    if dtype == "F16":
        is_few = len(set(sizes)) <= 64  # levels of quantized weights
        return not is_few and sum(0x3400 <= one < 0x4400 for one in sizes) > 0.99 * len(sizes)
    is_far = median(abs(one - other) for one, other in pairwise(sizes)) > 4 << 7
    return is_far and sum(one < 0x3400 for one in sizes) > 0.9 * len(sizes)


def differs(one: "StoredTensor", other: "StoredTensor", *, first: int, step: int) -> bool:
    """Whether blocks first, first + step, ... or the last differ."""
    last = max(0, one.num_bytes - 1) // BLOCK_BYTES
    with open_regular(one.file) as left, open_regular(other.file) as right:
        return any(
            _block(left, one, number) != _block(right, other, number) for number in {*range(first, last + 1, step), last}
        )


def _block(file: BinaryIO, tensor: "StoredTensor", number: int) -> bytes:
    at = number * BLOCK_BYTES
    return os.pread(file.fileno(), min(BLOCK_BYTES, tensor.num_bytes - at), tensor.offset + at)
