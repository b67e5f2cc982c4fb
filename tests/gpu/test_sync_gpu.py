"""Weights from shards to slices on a real GPU, bit for bit as torch's own copies. Needs `make native`, a CUDA GPU and no network."""

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tasuki.rollout.receive import WeightReceiver
from tasuki.v1 import weights_pb2
from tasuki.weights.copies import DeviceCopies, HostCopies, ViewCopy, compile_copies
from tasuki.weights.export import WeightExport
from tasuki.weights.imported_weights import import_weights
from tasuki.weights.plan import Slice, whole
from tasuki.wire.errors import BadHandle, WeightsCorrupt
from tests.received import ReceivedPiece, check_received
from tools.bench.sync_shapes import QWEN, QwenModel, random_shards

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

DEVICE = torch.device("cuda:0")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BITS = {2: torch.int16, 4: torch.int32}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    bits = BITS[left.element_size()]
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Draws every kind of number: subnormal, infinite, NaN, and values between two of a narrower type."""
    bits = torch.randint(-(2 ** (8 * dtype.itemsize - 1)), 2 ** (8 * dtype.itemsize - 1), shape, device=DEVICE)
    return bits.to(BITS[dtype.itemsize]).view(dtype)


def random_view(tensor: torch.Tensor, shape: tuple[int, ...], rng: random.Random) -> torch.Tensor:
    for dim, size in enumerate(shape):
        spare = tensor.shape[dim] - size
        tensor = tensor.narrow(dim, rng.choice([0, spare, rng.randint(0, spare)]), size)
    return tensor


@pytest.mark.parametrize("source_dtype", DTYPES)
@pytest.mark.parametrize("destination_dtype", DTYPES)
def test_random_copies_equal_copy_bit_for_bit(source_dtype: torch.dtype, destination_dtype: torch.dtype) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    copies, expected = [], []
    for _ in range(60):
        shape = tuple(rng.choice([1, 2, 3, 8, 16, 40, 64, 200]) for _ in range(rng.randint(1, 3)))
        sources = random_bits(tuple(size + rng.choice([0, 0, 1, 8]) for size in shape), source_dtype)
        held = random_bits(tuple(size + rng.choice([0, 0, 3, 8]) for size in shape), destination_dtype)
        source, destination = random_view(sources, shape, rng), random_view(held, shape, rng)
        if rng.random() < 0.2:
            order = rng.sample(range(len(shape)), len(shape))
            source, destination = source.permute(order), destination.permute(order)
            shape = tuple(destination.shape)
        after = held.clone()
        after.as_strided(destination.shape, destination.stride(), destination.storage_offset()).copy_(source)
        copies.append(ViewCopy(held=destination, source=source, where=whole(shape), owner=rng.randrange(3)))
        expected.append((held, after))
    DeviceCopies(copies, num_sums=1, device=DEVICE).start()
    assert all(same_bits(held, after) for held, after in expected)


@pytest.mark.parametrize("counted", DTYPES)
@pytest.mark.parametrize("held_dtype", DTYPES)
def test_checksums_on_the_device_equal_those_of_the_host(held_dtype: torch.dtype, counted: torch.dtype) -> None:
    torch.manual_seed(0)
    held = torch.randn((700, 520), device=DEVICE).to(held_dtype)
    slices = [
        (held, whole((700, 520), offset=12345)),
        (held[8:640, 16:520], Slice(640, (632, 504), (1024, 1))),
        (held[1:80, 3:200], Slice(7, (79, 197), (1, 400))),
        (torch.full((3,), -1.0, dtype=held_dtype, device=DEVICE), whole((3,), offset=2**40)),
    ]
    views = [ViewCopy(held=held, where=where, counted=counted, slot=slot) for slot, (held, where) in enumerate(slices)]
    on_device = DeviceCopies(views, num_sums=4, device=DEVICE)
    for _ in range(2):
        on_device.start()
        assert on_device.sums().tolist() == host_sums(views)


def host_sums(copies: list[ViewCopy]) -> list[int]:
    """Of what is held, counted as by these copies."""
    held = [
        ViewCopy(held=copy.held.cpu(), where=copy.where, counted=copy.dtypes.counted, slot=slot)
        for slot, copy in enumerate(copies)
    ]
    on_host = HostCopies(held, num_sums=len(held))
    on_host.start()
    return on_host.sums().tolist()


@pytest.mark.parametrize(("source_dtype", "destination_dtype"), [(dtype, dtype) for dtype in DTYPES] + [(DTYPES[0], DTYPES[2])])
def test_summed_copies_copy_and_give_the_checksums_of_their_slices(source_dtype: torch.dtype, destination_dtype: torch.dtype):
    torch.manual_seed(0)
    sources = torch.randn((700, 520), device=DEVICE).to(source_dtype)
    slices = [
        Slice(0, (300, 520), (520, 1)),
        Slice(300 * 520 + 8, (400, 256), (520, 1)),
        Slice(300 * 520 + 264, (400, 256), (520, 1)),
        Slice(3, (79, 197), (1, 520)),
    ]
    views = [sources.as_strided(at.shape, at.strides, at.offset) for at in slices]
    copies = [
        ViewCopy(
            held=torch.full(at.shape, torch.nan, dtype=destination_dtype, device=DEVICE),
            source=view,
            where=replace(at, offset=520 * 7 + at.offset),
            slot=slot,
        )
        for slot, (at, view) in enumerate(zip(slices, views, strict=True))
    ]
    fused = DeviceCopies(copies, num_sums=4, device=DEVICE)
    for _ in range(2):
        fused.start()
        assert fused.sums().tolist() == host_sums(copies)
        assert all(same_bits(copy.held, copy.source.to(destination_dtype)) for copy in copies)
        sources.neg_()


def num_compiled(kernel: Any) -> int:
    return sum(len(cache) for cache, *_ in kernel.device_caches.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_compiled_ahead_is_what_a_sync_launches(dtype: torch.dtype) -> None:
    from tasuki.weights.kernels import copy_and_sum_tiles, sum_tiles

    compile_copies(dtype, device=DEVICE)
    compiled = [num_compiled(kernel) for kernel in (copy_and_sum_tiles, sum_tiles)]
    assert all(compiled)
    source, held = torch.randn(2, 700, 520, device=DEVICE).to(dtype)
    at = whole(source.shape)
    sums = []
    for copy in (ViewCopy(held=held, source=source, where=at), ViewCopy(held=held, where=at)):
        copies = DeviceCopies([copy], num_sums=1, device=DEVICE)
        copies.start()
        sums.append(copies.sums().tolist())
    assert sums[0] == sums[1]
    assert [num_compiled(kernel) for kernel in (copy_and_sum_tiles, sum_tiles)] == compiled


class Trainer:
    """Ranks that publish fp32 masters as bfloat16, spread over the GPUs."""

    def __init__(self, folder: Path, *, model: str, num_ranks: int) -> None:
        shape = QWEN[model]
        gpus = [torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(num_ranks)]
        ranks = list(enumerate(gpus))
        self.shards = [
            random_shards(shape, rank=rank, num_ranks=num_ranks, dtype=torch.float32, device=gpu) for rank, gpu in ranks
        ]
        self.exports = [
            WeightExport(shards, rank=rank, num_ranks=num_ranks, dtype=torch.bfloat16, socket_path=folder / f"w{rank}.sock")
            for rank, shards in enumerate(self.shards)
        ]

    def publish(self, version: int) -> weights_pb2.PublishedWeights:
        for export in self.exports:
            export.publish(version)
        return self.handles(version)

    def handles(self, version: int) -> weights_pb2.PublishedWeights:
        handles = [export.handle() for export in self.exports]
        return weights_pb2.PublishedWeights(policy_version=version, boot_id="boot", handles=handles)

    def checkpoint(self, device: torch.device) -> list[tuple[str, torch.Tensor]]:
        names = [shard.name for shard in self.shards[0]]
        return [
            (name, torch.cat([shards[index].local.bfloat16().to(device) for shards in self.shards]))
            for index, name in enumerate(names)
        ]

    def close(self) -> None:
        for export in self.exports:
            export.close()


@pytest.fixture
def trainer(tmp_path: Path):
    trainer = Trainer(tmp_path, model="tiny", num_ranks=2)
    yield trainer
    trainer.close()


def receive(receiver: WeightReceiver, weights: weights_pb2.PublishedWeights) -> None:
    pieces = [ReceivedPiece(0, *sums) for sums in receiver.receive(weights, import_timeout_s=5).checksums]
    check_received(pieces, import_weights(weights, timeout_s=5))


def assert_loaded(trainer: Trainer, *, model: str, tp_sizes: list[int], version: int) -> None:
    """Checks that every tensor-parallel rank holds the values that its loader makes of the whole bfloat16 tensors."""
    weights = trainer.publish(version)
    for tp_size in tp_sizes:
        pieces = []
        for tp_rank in range(tp_size):
            device = torch.device("cuda", tp_rank % torch.cuda.device_count())
            arguments = {"tp_rank": tp_rank, "tp_size": tp_size, "dtype": torch.bfloat16, "device": device}
            received, loaded = QwenModel(QWEN[model], **arguments), QwenModel(QWEN[model], **arguments)
            sums = WeightReceiver(received).receive(weights, import_timeout_s=5).checksums
            pieces += [ReceivedPiece(tp_rank, *one) for one in sums]
            loaded.load_weights(trainer.checkpoint(device))
            for (name, held), (_, wanted) in zip(received.named_parameters(), loaded.named_parameters(), strict=True):
                assert same_bits(held.data, wanted.data), name
        check_received(pieces, import_weights(weights, timeout_s=5))


def test_a_sync_equals_the_models_own_loader(trainer: Trainer) -> None:
    assert_loaded(trainer, model="tiny", tp_sizes=[1, 2, 4], version=0)


def test_a_sync_of_a_7b_model_equals_its_own_loader(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, model="7b", num_ranks=2)
    assert_loaded(trainer, model="7b", tp_sizes=[2], version=0)
    trainer.close()


def tiny_receiver() -> WeightReceiver:
    return WeightReceiver(QwenModel(QWEN["tiny"], tp_rank=0, tp_size=1, dtype=torch.bfloat16, device=DEVICE))


def test_new_values_arrive_at_the_next_version_and_moved_parameters_are_followed(trainer: Trainer) -> None:
    receiver = tiny_receiver()
    receive(receiver, trainer.publish(0))
    trainer.shards[1][3].local.add_(1)
    receive(receiver, trainer.publish(1))
    parameter = cast(QwenModel, receiver.model)._parameters["model.norm.weight"]
    parameter.data = torch.full_like(parameter.data, torch.nan)
    receive(receiver, trainer.handles(1))
    assert not bool(parameter.data.isnan().any())


def test_a_changed_byte_in_published_memory_is_caught(trainer: Trainer) -> None:
    weights = trainer.publish(0)
    trainer.exports[0]._arena.tensors[5].view(torch.int16).flatten()[0] ^= 1
    with pytest.raises(WeightsCorrupt, match="1 of .* tensors did not arrive"):
        receive(tiny_receiver(), weights)


def test_a_process_without_a_gpu_reads_the_header_alone(trainer: Trainer) -> None:
    imported = import_weights(trainer.publish(3), timeout_s=5)
    imported.check_version(3)
    assert not imported.is_mapped and len(imported.checksums()) == len(QWEN["tiny"].checkpoint())
    with pytest.raises(BadHandle, match="cannot be imported on cpu"):
        import_weights(trainer.handles(3), timeout_s=5, device=torch.device("cpu"))


def test_closing_leaves_no_descriptor_and_no_device_memory(tmp_path: Path) -> None:
    def footprint() -> tuple[int, int]:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return len(os.listdir("/proc/self/fd")), torch.cuda.mem_get_info()[0] >> 20

    Trainer(tmp_path, model="tiny", num_ranks=1).close()
    before = footprint()
    trainer = Trainer(tmp_path, model="tiny", num_ranks=1)
    imported = import_weights(trainer.publish(0), timeout_s=5, device=DEVICE)
    assert footprint() != before
    imported.close()
    trainer.close()
    del trainer
    assert footprint() == before
