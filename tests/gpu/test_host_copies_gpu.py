"""Host copies of memory that leaves a real GPU: pinned ahead, and not repeated for frozen bytes."""

import time
from collections.abc import Callable

import pytest
import torch

from tasuki.memory import arena as native
from tasuki.memory.arena import Keep, NativeAllocator
from tasuki.wire.stages import MemoryTag

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

GIB, MIB = 1 << 30, 1 << 20
WEIGHTS = MemoryTag.WEIGHTS


def seconds_of_a_pause(allocator: NativeAllocator) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    allocator.pause([WEIGHTS])
    seconds = time.perf_counter() - started
    allocator.resume([WEIGHTS])
    return seconds


def test_frozen_bytes_cost_a_pause_nothing_and_come_back(
    allocator: NativeAllocator, record_property: Callable[[str, object], None]
) -> None:
    """8 GiB are frozen."""
    allocator.arena(WEIGHTS).set_policy(Keep.CONTENT)
    with allocator.region(WEIGHTS):
        base = [torch.full((GIB // 4,), float(index), device="cuda") for index in range(8)]
        adapter = torch.zeros(MIB, device="cuda")
    seconds_of_a_pause(allocator)  # pins
    copying = min(seconds_of_a_pause(allocator) for _ in range(3))
    assert all(native.freeze(one.data_ptr(), one.nbytes) for one in base)
    seconds_of_a_pause(allocator)
    frozen: list[float] = []
    for turn in range(3):
        adapter.fill_(turn)
        frozen.append(seconds_of_a_pause(allocator))
        assert all(bool((one == index).all()) for index, one in enumerate(base)) and bool((adapter == turn).all())
    record_property("copying_ms", 1000 * copying)
    record_property("frozen_ms", 1000 * min(frozen))
    assert min(frozen) < copying / 3


def test_memory_that_was_pinned_ahead_is_what_a_first_pause_copies_to(allocator: NativeAllocator) -> None:
    arena = allocator.arena(WEIGHTS)
    arena.set_policy(Keep.CONTENT)
    with allocator.region(WEIGHTS):
        tensor = torch.full((GIB,), 7, dtype=torch.uint8, device="cuda")
    steps = 0
    while arena.reserve_host(256 * MIB):
        steps += 1
    pinned = arena.usage().host_copy_bytes
    assert steps == 3 and pinned >= GIB
    assert seconds_of_a_pause(allocator) < 0.5  # pinning as much would take longer
    assert arena.usage().host_copy_bytes == pinned and int(tensor.min()) == int(tensor.max()) == 7
