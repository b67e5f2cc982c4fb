"""Words with the differences between two publications."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tasuki.transport.deltas import FAR, MOST, UNIT, Deltas, decode, encode

PATTERNS = st.integers(-(2**15), 2**15 - 1)


@given(
    old=st.lists(PATTERNS, min_size=UNIT, max_size=UNIT),
    moves=st.lists(st.one_of(st.integers(-MOST - 1, MOST + 1), PATTERNS), min_size=UNIT, max_size=UNIT),
)
def test_words_lead_from_the_old_bit_patterns_to_the_new_ones(old: list[int], moves: list[int]) -> None:
    held = torch.tensor(old, dtype=torch.int16)
    new = held + torch.tensor(moves, dtype=torch.int16)  # wraps, as a difference of any two bit patterns does
    words = encode(new.view(torch.bfloat16), held.view(torch.bfloat16))
    differences, is_far = decode(words)
    fits = all(abs(move) <= MOST for move in moves)
    assert words.shape == (1,) and is_far.tolist() == [not fits] * UNIT
    assert (int(words) == FAR) == (not fits)
    if fits:
        assert torch.equal(held + differences, new)


def test_equal_units_are_zero() -> None:
    same = torch.randn(5 * UNIT).bfloat16()
    assert encode(same, same.clone()).tolist() == [0] * 5


def test_only_whole_units_of_contiguous_copies_have_words() -> None:
    copies = torch.zeros(64 * UNIT, dtype=torch.bfloat16)
    deltas = Deltas(copies.data_ptr(), torch.arange(64, dtype=torch.int32))
    second = deltas.of(copies[8 : 4 * UNIT].view(3, UNIT))
    assert second is not None and second.tolist() == [1, 2, 3]
    assert deltas.of(copies[:12]) is None and deltas.of(copies[1 : 1 + UNIT]) is None
    assert deltas.of(copies.view(64, UNIT)[:, :4]) is None and deltas.of(copies.view(torch.float32)) is None
    words, first = deltas.around(copies.view(64, UNIT)[2:4, 3:5])
    assert (words.tolist(), first) == ([2, 3], 3)
