"""Arenas on a real GPU: pages, content, graphs, running kernels, room. Needs `make native`, one CUDA GPU and no network."""

import os

import pytest
import torch

from tasuki.memory import arena as native
from tasuki.memory.arena import Keep
from tasuki.trainer.memory import TorchCache
from tasuki.wire.errors import OutOfGpuMemory
from tasuki.wire.stages import MemoryTag
from tests.gpu.conftest import free_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


GIB, MIB = 1 << 30, 1 << 20


WEIGHTS, OPTIMIZER, KV_CACHE, CUDA_GRAPH = MemoryTag.WEIGHTS, MemoryTag.OPTIMIZER, MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH


def num_open_fds():
    return len(os.listdir("/proc/self/fd"))


def test_a_pause_frees_device_memory_and_a_resume_keeps_addresses(allocator):
    with allocator.region(KV_CACHE):
        layers = [torch.full((GIB,), layer, dtype=torch.uint8, device="cuda") for layer in range(8)]
    addresses, awake = [layer.data_ptr() for layer in layers], free_bytes()
    assert allocator.pause([KV_CACHE]) == 8 * GIB
    assert free_bytes() - awake >= 8 * GIB - 64 * MIB
    assert allocator.pause([KV_CACHE]) == 0
    assert allocator.resume([KV_CACHE]) == 8 * GIB
    assert abs(free_bytes() - awake) <= 64 * MIB
    assert [layer.data_ptr() for layer in layers] == addresses
    for value, layer in enumerate(layers):
        layer.fill_(value + 1)
    assert [int(layer[-1]) for layer in layers] == list(range(1, 9))


def test_kept_content_comes_back_bit_for_bit(allocator):
    with allocator.region(OPTIMIZER):
        moments = [torch.randn(257 * MIB // 4 + index, device="cuda") for index in range(5)]
    sums = [tensor.double().sum().item() for tensor in moments]
    copies = [tensor[::4097].cpu() for tensor in moments]
    for _ in range(3):
        allocator.pause([OPTIMIZER])
        allocator.resume([OPTIMIZER])
    assert [tensor.double().sum().item() for tensor in moments] == sums
    assert all(torch.equal(tensor[::4097].cpu(), copy) for tensor, copy in zip(moments, copies, strict=True))


def test_kept_chunks_hold_their_memory_and_their_content(allocator):
    allocator.arena(KV_CACHE).set_policy(Keep.CHUNKS)
    with allocator.region(KV_CACHE):
        pool = torch.full((2 * GIB,), 7, dtype=torch.uint8, device="cuda")
    awake = free_bytes()
    assert allocator.pause([KV_CACHE]) == 0
    assert abs(free_bytes() - awake) <= 16 * MIB
    assert allocator.resume([KV_CACHE]) == 2 * GIB
    assert int(pool.min()) == 7
    allocator.arena(KV_CACHE).set_policy(Keep.NOTHING)
    allocator.pause([KV_CACHE])
    assert free_bytes() - awake >= 2 * GIB - 16 * MIB
    allocator.resume([KV_CACHE])


def test_a_graph_captured_over_regions_replays_after_they_slept(allocator):
    with allocator.region(OPTIMIZER):
        weight = torch.randn(1024, 1024, device="cuda")
        source = torch.randn(64, 1024, device="cuda")
    (source @ weight).relu()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=allocator.cuda_regions().pool(CUDA_GRAPH).id):
        result = (source @ weight).relu() @ weight
    assert allocator.arena(CUDA_GRAPH).usage().used_bytes > 0
    graph.replay()
    torch.cuda.synchronize()
    expected = result.clone()
    for _ in range(3):
        allocator.pause([OPTIMIZER, CUDA_GRAPH])
        allocator.resume([OPTIMIZER, CUDA_GRAPH])
        result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)


def test_a_pause_waits_for_the_kernel_that_still_runs(allocator):
    with allocator.region(OPTIMIZER):
        counter = torch.zeros(64 * MIB, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(200):
            counter.add_(1)
    allocator.pause([OPTIMIZER])
    allocator.resume([OPTIMIZER])
    assert (int(counter.min()), int(counter.max())) == (200, 200)


def test_a_stream_waits_for_the_content_of_an_asynchronous_resume(allocator):
    with allocator.region(OPTIMIZER):
        moments = torch.full((GIB // 4,), 20.0, device="cuda")
    assert allocator.pause([OPTIMIZER]) == allocator.arena(OPTIMIZER).usage().total_bytes
    transfer = allocator.resume_async([OPTIMIZER])
    transfer.wait_on_stream(torch.cuda.current_stream().cuda_stream)
    moments.add_(1)
    transfer.wait()
    assert (int(moments.min()), int(moments.max())) == (21, 21)


def test_a_resume_without_room_changes_nothing_and_names_the_bytes(allocator):
    with allocator.region(WEIGHTS):
        weights = torch.ones(4 * GIB, dtype=torch.uint8, device="cuda")
    with allocator.region(KV_CACHE):
        kv_cache = torch.ones(16 * GIB, dtype=torch.uint8, device="cuda")
    allocator.pause([WEIGHTS, KV_CACHE])
    in_the_way = torch.empty(free_bytes() - 12 * GIB, dtype=torch.uint8, device="cuda")
    before = free_bytes()
    with pytest.raises(OutOfGpuMemory, match=r"needs 20.00 GiB for weights, kv_cache, 1\d\.\d\d GiB free") as refused:
        allocator.resume([WEIGHTS, KV_CACHE])
    assert refused.value.metadata["needed_bytes"] == str(20 * GIB)
    assert abs(free_bytes() - before) <= 16 * MIB
    assert allocator.resume([WEIGHTS]) == 4 * GIB
    weights.fill_(3)
    del in_the_way  # still cached by torch: the resume empties the cache by itself
    assert allocator.resume([KV_CACHE]) == 16 * GIB
    kv_cache.fill_(4)
    assert (int(weights[-1]), int(kv_cache[-1])) == (3, 4)


def test_training_with_sleep_in_every_step_equals_training_without(allocator):
    def losses(cycle):
        torch.manual_seed(0)
        with allocator.region(OPTIMIZER):
            model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        source, seen = torch.randn(64, 512, device="cuda"), []
        for _ in range(10):
            loss = (model(source) - source).square().mean()
            loss.backward()
            with allocator.region(OPTIMIZER):
                optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
            if cycle:
                allocator.pause([OPTIMIZER])
                allocator.resume([OPTIMIZER])
        return seen

    assert losses(True) == losses(False)


def test_300_cycles_leave_memory_and_descriptors_flat(allocator):
    with allocator.region(WEIGHTS):
        weights = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    with allocator.region(OPTIMIZER):
        moments = torch.full((64 * MIB,), 5, dtype=torch.uint8, device="cuda")

    def cycle():
        allocator.pause([WEIGHTS, OPTIMIZER])
        allocator.resume([WEIGHTS, OPTIMIZER])

    cycle()
    before = (num_open_fds(), native.totals(), free_bytes())
    for _ in range(300):
        cycle()
    assert (num_open_fds(), native.totals()) == before[:2]
    assert abs(free_bytes() - before[2]) <= 16 * MIB
    assert int(moments.min()) == 5
    weights.fill_(1)


def test_torch_returns_its_cache_only_where_too_little_is_free():
    cache = TorchCache(torch.device("cuda", 0))
    cache.return_blocks()
    before = free_bytes()
    torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
    cached = free_bytes()
    assert before - cached >= 8 * GIB
    cache.leave(cached - GIB)
    assert free_bytes() == cached
    cache.leave(cached + GIB)
    assert free_bytes() - cached >= 8 * GIB
