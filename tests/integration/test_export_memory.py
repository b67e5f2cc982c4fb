"""Memory of published weights: the parameters themselves or a copy, which stays over OFFLOAD or leaves and is mapped again."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tasuki.memory import arena as native
from tasuki.rollout.receive import WeightReceiver
from tasuki.v1 import weights_pb2
from tasuki.weights.imported_weights import import_weights
from tasuki.wire.stages import MemoryTag
from tests.integration.exporting_rank import EXPORT, MIB, WEIGHTS, Engine, TrainerRank
from tests.models import poison
from tests.received import ReceivedPiece, check_received

Start = Callable[..., TrainerRank]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def make(**settings: object) -> TrainerRank:
            rank = TrainerRank(tmp_path, **settings)
            stack.callback(rank.close)
            return rank

        yield make


def receive(receiver: WeightReceiver, weights: weights_pb2.PublishedWeights) -> None:
    """Syncs, with a front that releases its import as the ranks do."""
    front = import_weights(weights, timeout_s=2)
    pieces = [ReceivedPiece(0, *sums) for sums in receiver.receive(weights, import_timeout_s=2).checksums]
    check_received(pieces, front)
    front.close()


def assert_holds(receiver: WeightReceiver, trainer: TrainerRank) -> None:
    for name, parameter in receiver.model.named_parameters():
        wanted = trainer.tensors["large" if name == "again" else name].to(trainer.published).to(parameter.dtype)
        assert torch.equal(parameter.data, wanted), name


MODES = [
    pytest.param({"dtype": torch.float32, "published": torch.float32, "in_place": True}, id="float32 in place"),
    pytest.param({"dtype": torch.bfloat16, "published": torch.bfloat16, "in_place": True}, id="bfloat16 in place"),
    pytest.param({"dtype": torch.float32, "published": torch.float32, "in_place": False}, id="float32 copied"),
    pytest.param({"dtype": torch.float32, "published": torch.bfloat16, "in_place": False}, id="cast"),
    pytest.param({"dtype": torch.float32, "published": torch.bfloat16, "in_place": True}, id="of another dtype than in place"),
]


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
@pytest.mark.parametrize("mode", MODES)
def test_round_after_round_arrives_bit_for_bit_by_one_plan(start: Start, mode: dict[str, object], leaves: bool) -> None:
    trainer = start(**mode, leaves=leaves)
    receiver = WeightReceiver(Engine(mode["published"]))
    plan, manifest = None, None
    for version in range(3):
        weights = trainer.publish(version)
        assert manifest in (None, trainer.export._arena.manifest), "memory that returns to its place is described once"
        manifest = trainer.export._arena.manifest
        poison(receiver.model)
        receive(receiver, weights)
        assert_holds(receiver, trainer)
        assert plan in (None, receiver.plan), "what was recorded holds on"
        plan = receiver.plan
        trainer.offload()
        trainer.load()
        assert_holds(receiver, trainer)
        trainer.train()


def test_parameters_in_place_are_not_copied_and_others_of_their_arena_are_not_shared(start: Start) -> None:
    trainer = start(dtype=torch.float32, published=torch.float32, in_place=True, leaves=False)
    tensors = trainer.export._arena.tensors
    assert [held.data_ptr() == own.data_ptr() for held, own in zip(tensors, trainer.tensors.values(), strict=True)] == [
        True,
        True,
        False,
    ]
    usage = {MemoryTag.of(usage.tag): usage.total_bytes for usage in trainer.allocator.usage()}
    assert usage[EXPORT] == 2 * MIB  # the smallest chunk, for the small tensor
    assert sum(trainer.export._arena.manifest.chunk_bytes) < usage[WEIGHTS] - 16 * MIB


def test_kept_parameters_are_readable_while_the_trainer_is_offloaded(start: Start) -> None:
    trainer = start(dtype=torch.float32, published=torch.float32, in_place=True, leaves=False)
    wanted = {name: tensor.clone() for name, tensor in trainer.tensors.items()}
    weights = trainer.publish(0)
    imported = import_weights(weights, timeout_s=2)
    trainer.offload()
    assert all(torch.equal(imported.gathered(name), tensor) for name, tensor in wanted.items())
    assert imported.is_of(weights)
    imported.check_version(0)
    imported.close()


def shared_files() -> int:
    """Bytes of shared memory that this process can still reach, by a mapping or a descriptor."""
    files: dict[int, int] = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "/memfd:tasuki" in os.readlink(f"/proc/self/fd/{fd}"):
                status = os.stat(f"/proc/self/fd/{fd}")
                files[status.st_ino] = status.st_size
        except FileNotFoundError:
            continue
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode, *name = line.split(maxsplit=5)
        if name and "/memfd:tasuki" in name[0]:
            start, end = (int(part, 16) for part in addresses.split("-"))
            files[int(inode)] = max(files.get(int(inode), 0), end - start)
    return sum(files.values())


def resident_shared_bytes() -> int:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssShmem"].split()[0]) << 10


def test_what_leaves_is_really_gone_from_publisher_and_reader(start: Start) -> None:
    trainer = start(dtype=torch.float32, published=torch.bfloat16, in_place=False, leaves=True)
    receiver = WeightReceiver(Engine(torch.bfloat16))
    held, imported = [shared_files(), resident_shared_bytes()], native.totals().imported_bytes
    for version in range(3):
        receive(receiver, trainer.publish(version))
        assert native.totals().imported_bytes == imported, "a reader holds nothing after it has read"
        released = trainer.offload()
        usage = {MemoryTag.of(usage.tag): usage for usage in trainer.allocator.usage()}
        assert (usage[EXPORT].mapped_bytes, usage[EXPORT].is_paused) == (0, True)
        assert released == sum(one.total_bytes for one in usage.values()), "nothing of it is held by a descriptor"
        assert shared_files() <= held[0] - released + 4096
        assert resident_shared_bytes() < held[1] - 16 * MIB
        trainer.load()
