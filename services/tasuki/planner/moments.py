"""Sizes of AdamW's moments, in full or in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LARGEST_BLOCK = 256
_SMALLEST_BLOCK = 32
_SCALE_BYTES = 4


def moment_block(shape: Sequence[int]) -> int | None:
    """Elements of a row that share one scale in 8 bits, for a parameter of this shape; None if its moments are not quantized.

    That is the case for vectors and for matrices whose rows are not divisible by a block of 32.
    """
    if len(shape) < 2 or shape[0] == 1:
        return None
    block = math.gcd(shape[-1], _LARGEST_BLOCK)
    return block if block >= _SMALLEST_BLOCK else None


def moment_bytes(shape: Sequence[int], *, element_bytes: int, is_8bit: bool) -> list[int]:
    """Sizes of the tensors that hold both moments of a shard. element_bytes: of an unquantized element."""
    block, num_elements = moment_block(shape) if is_8bit else None, math.prod(shape)
    if block is None:
        return [num_elements * element_bytes] * 2
    return [num_elements, num_elements // block * _SCALE_BYTES] * 2
