"""Copies and checksums of host memory in csrc give the same as torch's copies and Python's checksum."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from tasuki.weights.checksum import checksum
from tasuki.weights.copies import HostCopies, ViewCopy
from tasuki.weights.plan import Slice, whole
from tests.extent import examples

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


def sums(*copies: ViewCopy, num_sums: int = 1) -> list[int]:
    prepared = HostCopies(copies, num_sums=num_sums)
    for _ in range(2):  # a start begins at zero
        prepared.start()
    return prepared.sums().tolist()


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
    found = sums(ViewCopy(held=destination, source=view, where=place(view), slot=1), num_sums=2)
    assert bits(destination) == bits(view)
    assert found == [0, checksum(view, place(view))]
    assert sums(ViewCopy(held=view, where=place(view))) == found[1:]


def test_sums_of_one_slot_add_up() -> None:
    tensor = random_tensor((1000, 37), torch.bfloat16, seed=1)
    held = torch.empty_like(tensor)
    halves = [(held[:500], tensor[:500]), (held[500:], tensor[500:])]
    copies = [ViewCopy(held=held, source=source, where=place(source)) for held, source in halves]
    assert sums(*copies) == [checksum(tensor, whole(tensor.shape))]


def test_a_large_tensor_is_summed_in_parts_by_several_threads() -> None:
    tensor = random_tensor((3, 1_500_001), torch.float32, seed=2)
    assert sums(ViewCopy(held=tensor, where=whole(tensor.shape))) == [checksum(tensor, whole(tensor.shape))]


@pytest.mark.parametrize("counted", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("source_dtype", [torch.bfloat16, torch.float32, None])
def test_what_counts_in_another_dtype_is_cast_first(counted: torch.dtype, source_dtype: torch.dtype | None) -> None:
    values = torch.randn(40, 9).bfloat16()
    source, where = None if source_dtype is None else values.to(source_dtype), whole(values.shape)
    held = torch.empty(40, 9) if source_dtype is not None else values.float()
    assert sums(ViewCopy(held=held, source=source, where=where, counted=counted)) == [checksum(values.to(counted), where)]
    assert torch.equal(held, values.float())
