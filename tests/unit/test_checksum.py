"""The checksum that adds up over slices and sees every changed element."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasuki.weights import checksum as checksum_module
from tasuki.weights.checksum import MODULUS, checksum
from tasuki.weights.plan import Slice, whole
from tests.extent import examples


def place(view: torch.Tensor) -> Slice:
    return Slice(view.storage_offset(), tuple(view.shape), view.stride())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_disjoint_slices_add_up_to_the_whole(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 12).to(dtype)
    views = [tensor[:3, :5], tensor[:3, 5:], tensor[3:, ::2].t(), tensor[3:, 1::2]]
    total = checksum(tensor, whole(tensor.shape))
    assert sum(checksum(view, place(view)) for view in views) % MODULUS == total


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 59), st.integers(0, 15))
def test_any_flipped_bit_is_seen(index: int, bit: int) -> None:
    tensor = torch.arange(60, dtype=torch.float32).bfloat16()
    before = checksum(tensor, whole((60,)))
    tensor.view(torch.int16)[index] ^= 1 << bit if bit < 15 else -(1 << 15)
    assert checksum(tensor, whole((60,))) != before


def test_swapped_and_shifted_elements_are_seen() -> None:
    tensor = torch.randn(1000).bfloat16()
    total = checksum(tensor, whole((1000,)))
    assert checksum(tensor.flip(0), whole((1000,))) != total
    assert checksum(tensor.roll(1), whole((1000,))) != total


def test_chunks_do_not_change_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(33, 17, 5).bfloat16()
    view = tensor[1:, ::2].transpose(0, 2)
    expected = checksum(tensor, whole(tensor.shape)), checksum(view, place(view))
    monkeypatch.setattr(checksum_module, "_CHUNK_NUMEL", 7)
    assert (checksum(tensor, whole(tensor.shape)), checksum(view, place(view))) == expected


def test_bit_patterns_of_another_dtype_can_be_asked_for() -> None:
    tensor = torch.randn(40).bfloat16()
    assert checksum(tensor.float(), whole((40,)), dtype=torch.bfloat16) == checksum(tensor, whole((40,)))


def test_nothing_has_sum_zero() -> None:
    assert checksum(torch.empty(0, 4), whole((0, 4))) == 0
