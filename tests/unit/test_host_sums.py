"""Copies and checksums of host memory in csrc give the same as torch's copies and Python's checksum."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from tasuki.weights.checksum import checksum
from tasuki.weights.copies import ViewChecksum, ViewCopy, prepare_checksums, prepare_summed_copies
from tasuki.weights.plan import Slice, whole
from tests.extent import examples

CPU = torch.device("cpu")
DTYPES = [torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.int64]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, *, seed: int) -> torch.Tensor:
    """Draws any bit pattern, including those of NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = torch.empty(shape, dtype=dtype).nbytes
    bits = torch.randint(256, (max(1, num_bytes),), dtype=torch.uint8, generator=generator)
    return bits[:num_bytes].view(dtype).view(shape)


def bits(view: torch.Tensor) -> bytes:
    # A copy of one element may keep its earlier stride.
    flat = torch.empty(view.numel(), dtype=view.dtype)
    flat.view(view.shape).copy_(view)
    return flat.view(torch.uint8).numpy().tobytes()


def place(view: torch.Tensor) -> Slice:
    return Slice(view.storage_offset(), tuple(view.shape), view.stride())


@settings(max_examples=examples(150), deadline=None)
@given(
    shape=some.lists(some.integers(0, 12), min_size=1, max_size=4).map(tuple),
    dtype=some.sampled_from(DTYPES),
    order=some.randoms(use_true_random=False),
    seed=some.integers(0, 1000),
)
def test_any_view_is_copied_and_summed_as_by_torch(shape: tuple[int, ...], dtype: torch.dtype, order, seed: int) -> None:
    tensor = random_tensor(shape, dtype, seed=seed)
    view = tensor.permute(order.sample(range(len(shape)), len(shape)))
    for dim, size in enumerate(view.shape):
        start = order.randint(0, size)
        view = view.narrow(dim, start, order.randint(0, size - start))
    destination = (
        torch.zeros(view.shape, dtype=dtype)
        .permute(*range(view.dim() - 1, -1, -1))
        .contiguous()
        .permute(*range(view.dim() - 1, -1, -1))
    )
    copies = prepare_summed_copies([ViewCopy(destination, view, where=place(view), slot=1)], num_sums=2, device=CPU)
    copies.start()
    assert bits(destination) == bits(view)
    assert copies.sums().tolist() == [0, checksum(view, place(view))]
    (held,) = prepare_checksums([ViewChecksum(view, place(view), dtype)], device=CPU).read()
    assert held == checksum(view, place(view))


def test_sums_of_one_slot_add_up_and_a_start_begins_at_zero() -> None:
    tensor = random_tensor((1000, 37), torch.bfloat16, seed=1)
    held = torch.empty_like(tensor)
    halves = [(held[:500], tensor[:500]), (held[500:], tensor[500:])]
    copies = prepare_summed_copies([ViewCopy(*half, where=place(half[1])) for half in halves], num_sums=1, device=CPU)
    for _ in range(2):
        copies.start()
        assert copies.sums().tolist() == [checksum(tensor, whole(tensor.shape))]


def test_a_large_tensor_is_summed_in_parts_by_several_threads() -> None:
    tensor = random_tensor((3, 1_500_001), torch.float32, seed=2)
    (held,) = prepare_checksums([ViewChecksum(tensor, whole(tensor.shape), torch.float32)], device=CPU).read()
    assert held == checksum(tensor, whole(tensor.shape))


@pytest.mark.parametrize("counted", [torch.bfloat16, torch.float32])
def test_what_counts_in_another_dtype_is_cast_first(counted: torch.dtype) -> None:
    source = torch.randn(40, 9).bfloat16()
    held = torch.empty(40, 9)
    copies = prepare_summed_copies([ViewCopy(held, source, where=whole(held.shape))], num_sums=1, device=CPU)
    copies.start()
    assert torch.equal(held, source.float()) and copies.sums().tolist() == [checksum(source, whole(source.shape))]
    (summed,) = prepare_checksums([ViewChecksum(held, whole(held.shape), counted)], device=CPU).read()
    assert summed == checksum(held, whole(held.shape), dtype=counted)
