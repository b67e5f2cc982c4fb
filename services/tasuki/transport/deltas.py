"""Differences between two publications: for every 16 bytes of published weights, a word of eight 4-bit deltas.

A step of an optimizer moves few bfloat16 numbers, and most of those by one or two places. A reader that holds the previous publication
applies the words, a quarter of the bytes, and reads in full only what moved further.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = 8
"""Elements of a word, of two bytes each."""
UNIT_BYTES = 16
MOST = 7
"""The largest difference of two bit patterns, as 16-bit integers, that a word holds."""
FAR = 0x88888888 - (1 << 32)
"""The word of a unit with a larger difference, as int32; -8 in all eight places."""


@dataclass(frozen=True, slots=True)
class Deltas:
    """Words of the published copies of one rank.

    first: address of the first byte that they describe. words: [num_units] int32; word i describes 16 bytes from first + 16 * i on.
    """

    first: int
    words: Tensor

    @property
    def shift(self) -> int:
        """The word of the unit at an address lies at address // 4 + shift."""
        return self.words.data_ptr() - self.first // 4

    def of(self, tensor: Tensor) -> Tensor | None:
        """Words of a tensor among the copies; None unless it is contiguous and consists of whole units of 2-byte elements."""
        offset = tensor.data_ptr() - self.first
        if tensor.element_size() != 2 or not tensor.is_contiguous() or tensor.numel() % UNIT or offset % UNIT_BYTES:
            return None
        return self.words[offset // UNIT_BYTES : offset // UNIT_BYTES + tensor.numel() // UNIT]

    def around(self, view: Tensor) -> tuple[Tensor, int]:
        """Words of all units that a view of 2-byte elements touches, and the index of its first element among theirs."""
        start = (view.data_ptr() - self.first) // 2
        end = start + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)) + 1
        return self.words[start // UNIT : -(-end // UNIT)], start % UNIT


def encode(new: Tensor, old: Tensor) -> Tensor:
    """Words [n / 8] of two tensors of n 2-byte elements, n a multiple of 8."""
    differences = (_bits(new) - _bits(old)).view(-1, UNIT).to(torch.int32)
    words = ((differences & 0xF) << _shifts(new.device)).sum(dim=1)
    words = torch.where(words > torch.iinfo(torch.int32).max, words - (1 << 32), words).to(torch.int32)
    return torch.where((differences.abs() > MOST).any(dim=1), FAR, words)


def decode(words: Tensor) -> tuple[Tensor, Tensor]:
    """Differences of bit patterns, [8 n] int16, and whether each element belongs to a unit to be read in full, [8 n] bool."""
    places = words[:, None] >> _shifts(words.device) & 0xF
    differences = ((places ^ 8) - 8).to(torch.int16)
    return differences.flatten(), (words == FAR).repeat_interleave(UNIT)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.int16)


def _shifts(device: torch.device) -> Tensor:
    """Bits of each difference in a word: even elements in the lower half, so that two at a time are shifted to where their elements are."""
    places = torch.arange(UNIT, dtype=torch.int32, device=device)
    return 4 * (places // 2) + 16 * (places % 2)
