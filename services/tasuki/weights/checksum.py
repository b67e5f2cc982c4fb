"""An additive checksum of weights: the sums of a tensor's disjoint parts add up, modulo 2^64, to that of the tensor."""

from collections.abc import Iterator

import torch

from tasuki.weights.plan import Slice

MODULUS = 2**64
GROUP = 8
"""Consecutive indices whose weights derive from one mixed number: 16 bytes of bfloat16."""
_CHUNK_NUMEL = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd constants of splitmix64, as signed 64-bit numbers, and of xxHash32.
STEP = 0x9E3779B97F4A7C15 - MODULUS
MIX = 0xBF58476D1CE4E5B9 - MODULUS
KEY_STEP = 0x9E3779B1
KEY_MIX = 0x85EBCA77
_LOW_32_BITS = (1 << 32) - 1


def _key(place: int) -> int:
    key = (place + 1) * KEY_STEP & _LOW_32_BITS
    key = (key ^ key >> 15) * KEY_MIX & _LOW_32_BITS
    return (key ^ key >> 13) | 1


_KEYS = tuple(_key(place) for place in range(GROUP))


def checksum(values: torch.Tensor, where: Slice, *, dtype: torch.dtype | None = None) -> int:
    """Sum over elements of bit pattern times weight(i), modulo 2^64; i is the element's flat index in the *whole* tensor.

    values: any strides. where: same shape, the indices of its elements in the whole tensor. dtype: of the bit patterns, if not that
    of `values`.
    weight(i) is an odd signed 32-bit number, so a single changed element always changes the sum, and a GPU needs one multiplication per
    element. It looks random: swapped elements go unnoticed with a probability of about 2^-29, shifted or lost ones of about 2^-48.
    Needs temporaries of a few chunks of 2^20 elements, whatever the size.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for part, place in _chunks(values, where):
        part = part if dtype is None else part.to(dtype)
        bits = part.view(_BITS[part.element_size()]).to(torch.int64)
        total += (bits * _weights(place, device=values.device)).sum()
    return int(total) % MODULUS


def _chunks(values: torch.Tensor, where: Slice) -> Iterator[tuple[torch.Tensor, Slice]]:
    if where.numel <= _CHUNK_NUMEL:
        yield values, where
        return
    dim = max(range(len(where.shape)), key=lambda dim: where.shape[dim])
    step = max(1, where.shape[dim] * _CHUNK_NUMEL // where.numel)
    for start in range(0, where.shape[dim], step):
        length = min(step, where.shape[dim] - start)
        yield from _chunks(values.narrow(dim, start, length), where.narrowed(dim, start, length))


def _weights(where: Slice, *, device: torch.device) -> torch.Tensor:
    index = torch.full(where.shape, where.offset, dtype=torch.int64, device=device)
    for dim, (size, stride) in enumerate(zip(where.shape, where.strides, strict=True)):
        steps = torch.arange(size, dtype=torch.int64, device=device) * stride
        index += steps.view([-1 if d == dim else 1 for d in range(len(where.shape))])
    keys = torch.tensor(_KEYS, dtype=torch.int64, device=device)[index & (GROUP - 1)]
    mixed = (index >> 3).mul_(STEP)
    mixed ^= (mixed >> 32) & _LOW_32_BITS
    mixed *= MIX
    weight = (mixed ^ (mixed >> 32)).mul_(keys).add_(mixed >> 32).bitwise_or_(1).bitwise_and_(_LOW_32_BITS)
    return weight.bitwise_xor_(1 << 31).sub_(1 << 31)
