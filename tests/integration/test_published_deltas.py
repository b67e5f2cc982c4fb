"""Deltas between two publications, read in the place of whole weights: when they may be, and that weights are the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tasuki.memory.tags import MemoryTag
from tasuki.rollout.rank_commands import EngineRank, rank_allocator
from tasuki.rollout.receive import Received, WeightReceiver
from tasuki.transport.deltas import FAR, UNIT
from tasuki.transport.imported_weights import import_weights
from tasuki.v1 import memory_pb2, ranks_pb2, types_pb2, weights_pb2
from tasuki.wire.errors import WeightsCorrupt
from tests.drifting import drifted
from tests.integration.exporting_rank import Engine, Replacing, TrainerRank
from tests.models import poison
from tests.received import ReceivedPiece, check_received

NUM_RANKS = 2
WEIGHTS = [types_pb2.MEMORY_TAG_WEIGHTS]


class Trainer:
    """Two ranks with float32 masters, which publish bfloat16 with deltas."""

    def __init__(self, folder: Path, stack: ExitStack, **settings: object) -> None:
        given = {"dtype": torch.float32, "published": torch.bfloat16, "in_place": False, "leaves": False, "has_deltas": True}
        self.ranks = [TrainerRank(folder, **(given | settings), rank=rank, num_ranks=NUM_RANKS) for rank in range(NUM_RANKS)]
        for rank in self.ranks:
            stack.callback(rank.close)

    def step(self) -> None:
        for rank in self.ranks:
            for tensor in rank.tensors.values():
                tensor.copy_(drifted(tensor))

    def publish(self, version: int) -> weights_pb2.PublishedWeights:
        handles = [handle for rank in self.ranks for handle in rank.publish(version).handles]
        return weights_pb2.PublishedWeights(policy_version=version, boot_id="boot", handles=handles)

    def whole(self, name: str) -> torch.Tensor:
        return torch.cat([rank.tensors[name] for rank in self.ranks]).bfloat16()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    with ExitStack() as stack:
        yield Trainer(tmp_path, stack)


@pytest.fixture
def receiver(trainer: Trainer) -> WeightReceiver:
    """Holds publication 0."""
    receiver = WeightReceiver(Engine(torch.bfloat16))
    assert not receive(receiver, trainer, trainer.publish(0)).applied_deltas
    trainer.step()
    return receiver


def receive(receiver: WeightReceiver, trainer: Trainer, weights: weights_pb2.PublishedWeights) -> Received:
    """Syncs, compares the sums as the front does, and the weights with the trainer's."""
    received = receiver.receive(weights, import_timeout_s=2)
    front = import_weights(weights, timeout_s=2)
    check_received([ReceivedPiece(0, *sums) for sums in received.checksums], front)
    front.close()
    for name, parameter in receiver.model.named_parameters():
        wanted = trainer.whole("large" if name == "again" else name)
        assert torch.equal(parameter.data.view(torch.int16), wanted.view(torch.int16)), name
    return received


def test_later_syncs_apply_deltas(trainer: Trainer, receiver: WeightReceiver) -> None:
    for version in range(1, 4):
        weights = trainer.publish(version)
        for rank in trainer.ranks:
            held = rank.export._arena.tensors[0].view(-1, 8)
            words = rank.export._arena.deltas.of(rank.export._arena.tensors[0])
            assert 0.1 < (words == 0).float().mean() < 0.9
            held[words == 0] = torch.nan  # is not read
        assert receive(receiver, trainer, weights).applied_deltas
        for rank in trainer.ranks:
            held = rank.export._arena.tensors[0]
            held.copy_(rank.tensors["large"])
        trainer.step()


def test_a_publication_that_was_missed_is_made_up_for_by_a_whole_one(trainer: Trainer, receiver: WeightReceiver) -> None:
    trainer.publish(1)
    trainer.step()
    weights = trainer.publish(2)
    poison(receiver.model)
    assert not receive(receiver, trainer, weights).applied_deltas
    trainer.step()
    assert receive(receiver, trainer, trainer.publish(3)).applied_deltas


def test_the_same_publication_is_read_whole_a_second_time(trainer: Trainer, receiver: WeightReceiver) -> None:
    """Applied twice, deltas would lead past it."""
    weights = trainer.publish(1)
    assert receive(receiver, trainer, weights).applied_deltas
    poison(receiver.model)
    assert not receive(receiver, trainer, weights).applied_deltas


def test_a_sync_that_failed_is_followed_by_a_whole_one(
    trainer: Trainer, receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = trainer.publish(1)
    with monkeypatch.context() as broken:
        broken.setattr(receiver._prepared, "finish", lambda model: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            receiver.receive(weights, import_timeout_s=2)
    assert not receive(receiver, trainer, weights).applied_deltas


def test_parameters_that_moved_are_filled_by_a_whole_one(trainer: Trainer, receiver: WeightReceiver) -> None:
    receiver.model.large.data = torch.full_like(receiver.model.large, torch.nan)
    assert not receive(receiver, trainer, trainer.publish(1)).applied_deltas


def test_a_trainer_that_started_again_is_read_whole(tmp_path: Path, trainer: Trainer, receiver: WeightReceiver) -> None:
    weights = trainer.publish(1)
    weights.boot_id = "another"
    poison(receiver.model)
    assert not receive(receiver, trainer, weights).applied_deltas


def test_weights_that_changed_by_themselves_are_noticed(trainer: Trainer, receiver: WeightReceiver) -> None:
    weights = trainer.publish(1)
    words = trainer.ranks[0].export._arena.deltas.of(trainer.ranks[0].export._arena.tensors[0])
    unit = int((words != FAR).nonzero()[0])  # the others are read in full
    receiver.model.large.data.view(-1)[unit * UNIT] += 1
    with pytest.raises(WeightsCorrupt, match="1 of 3 tensors did not arrive as published: large"):
        receive(receiver, trainer, weights)


def test_an_engine_of_another_dtype_gets_whole_numbers(trainer: Trainer) -> None:
    receiver = WeightReceiver(Engine(torch.float32))
    for version in range(2):
        weights = trainer.publish(version)
        receiver.receive(weights, import_timeout_s=2)
        for name, parameter in receiver.model.named_parameters():
            assert torch.equal(parameter.data, trainer.whole("large" if name == "again" else name).float())
        trainer.step()


@pytest.mark.parametrize("settings", [{"leaves": True}, {"dtype": torch.bfloat16, "in_place": True}, {"has_deltas": False}])
def test_copies_that_leave_and_parameters_in_place_are_read_whole(tmp_path: Path, settings: dict[str, object]) -> None:
    with ExitStack() as stack:
        trainer = Trainer(tmp_path, stack, **settings)
        receiver = WeightReceiver(Engine(torch.bfloat16))
        for version in range(3):
            assert not receive(receiver, trainer, trainer.publish(version)).applied_deltas
            for rank in trainer.ranks:
                rank.offload()
                rank.load()
            trainer.step()


@pytest.mark.parametrize(("stays", "applies"), [(True, True), (False, False)])
def test_weights_that_slept_are_read_whole(trainer: Trainer, stays: bool, applies: bool) -> None:
    allocator = rank_allocator("cpu")
    with allocator.region(MemoryTag.WEIGHTS):
        model = Engine(torch.bfloat16)
    rank = EngineRank(model, allocator, rank=0, staying=frozenset([MemoryTag.WEIGHTS] if stays else []))
    receive(rank.receiver, trainer, trainer.publish(0))
    rank._pause(memory_pb2.PauseRequest(tags=[types_pb2.MEMORY_TAG_WEIGHTS]))
    rank.memory.resume(memory_pb2.ResumeRequest(tags=[types_pb2.MEMORY_TAG_WEIGHTS]))
    trainer.step()
    assert receive(rank.receiver, trainer, trainer.publish(1)).applied_deltas is applies


@pytest.mark.parametrize("failed", range(NUM_RANKS))
def test_a_publication_that_failed_on_any_rank_is_followed_by_a_whole_one(
    trainer: Trainer, receiver: WeightReceiver, failed: int
) -> None:
    for index, rank in enumerate(trainer.ranks):
        if index == failed:
            with pytest.raises(ZeroDivisionError):
                rank.export.publish(1, replaced=Replacing("large", lambda held: 1 / 0))
        else:
            rank.publish(1)
    poison(receiver.model)
    assert not receive(receiver, trainer, trainer.publish(2)).applied_deltas
    trainer.step()
    assert receive(receiver, trainer, trainer.publish(3)).applied_deltas


@pytest.mark.parametrize("missed", range(NUM_RANKS))
def test_a_publication_of_one_rank_alone_counts_as_missed(trainer: Trainer, receiver: WeightReceiver, missed: int) -> None:
    """The other rank failed before it wrote anything."""
    trainer.ranks[missed].publish(1)
    trainer.step()
    poison(receiver.model)
    assert not receive(receiver, trainer, trainer.publish(2)).applied_deltas
    trainer.step()
    assert receive(receiver, trainer, trainer.publish(3)).applied_deltas


def test_what_replaces_shards_is_read_whole(trainer: Trainer, receiver: WeightReceiver) -> None:
    handles: list[weights_pb2.WeightHandle] = []
    for rank in trainer.ranks:
        changed = 3 * rank.tensors["large"]
        rank.export.publish(1, replaced=Replacing("large", lambda held, changed=changed: held.copy_(changed)))
        rank.tensors["large"].copy_(changed)
        handles.append(rank.export.handle())
    weights = weights_pb2.PublishedWeights(policy_version=1, boot_id="boot", handles=handles)
    assert not receive(receiver, trainer, weights).applied_deltas
    trainer.step()
    assert receive(receiver, trainer, trainer.publish(2)).applied_deltas


def test_the_command_to_pause_weights_forgets_them(trainer: Trainer) -> None:
    allocator = rank_allocator("cpu")
    with allocator.region(MemoryTag.WEIGHTS):
        model = Engine(torch.bfloat16)
    rank = EngineRank(model, allocator, rank=0)
    receive(rank.receiver, trainer, trainer.publish(0))
    for command in (
        ranks_pb2.EngineRankCommand(pause=memory_pb2.PauseRequest(tags=WEIGHTS)),
        ranks_pb2.EngineRankCommand(resume=memory_pb2.ResumeRequest(tags=WEIGHTS)),
    ):
        assert not rank.commands.run(command).HasField("error")
    trainer.step()
    assert not receive(rank.receiver, trainer, trainer.publish(1)).applied_deltas


def test_parameters_whose_storage_moved_are_read_whole(trainer: Trainer, receiver: WeightReceiver) -> None:
    """The same parameter, with other memory: the plan is made again before anything is written."""
    storage = receiver.model.large.data.untyped_storage()
    before = receiver.model.large.data_ptr()
    storage.resize_(0)
    kept = torch.full_like(receiver.model.odd, torch.nan)
    storage.resize_(2 * receiver.model.large.numel() + (1 << 22))
    assert kept.numel() and receiver.model.large.data_ptr() != before, "moved"
    poison(receiver.model)
    assert not receive(receiver, trainer, trainer.publish(1)).applied_deltas


def test_a_copy_that_leaves_but_has_not_left_may_be_read_by_deltas(tmp_path: Path) -> None:
    """A changeover that was undone before OFFLOAD, and made again."""
    with ExitStack() as stack:
        trainer = Trainer(tmp_path, stack, leaves=True)
        receiver = WeightReceiver(Engine(torch.bfloat16))
        for version in range(3):
            received = receive(receiver, trainer, trainer.publish(version))
            assert received.applied_deltas is (version > 0)
            for rank in trainer.ranks:
                rank.export.withdraw()
            trainer.step()
