"""Memory released between two publications: nobody can get it then, and readers hold it only while they read."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tasuki.memory import arena as native
from tasuki.rollout.receive import WeightReceiver
from tasuki.rollout.rollout import RankCalls
from tasuki.rollout.sync import WeightSync
from tasuki.v1 import weights_pb2
from tasuki.weights.imported_weights import import_weights
from tasuki.wire.errors import BadHandle, TasukiError, VersionOrder
from tests.integration.breaking_rank import BreakingRank
from tests.integration.exporting_rank import SHAPES, Engine, TrainerRank


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[TrainerRank]:
    rank = TrainerRank(tmp_path, dtype=torch.float32, published=torch.bfloat16, in_place=False, leaves=True)
    yield rank
    rank.close()


def offload_and_load(trainer: TrainerRank) -> None:
    trainer.offload()
    trainer.load()
    trainer.train()


# --- the publisher


def test_nothing_is_handed_out_while_the_memory_is_away(trainer: TrainerRank, caplog: pytest.LogCaptureFixture) -> None:
    """A message never carries other files that were given the numbers of descriptors sent before."""
    weights = trainer.publish(0)
    numbers = set(trainer.export._arena.fds)
    with ExitStack() as cleanup, trainer.export.released():
        others = [os.memfd_create("another-secret") for _ in range(200)]
        for other in others:
            cleanup.callback(os.close, other)
        assert numbers - {trainer.export._header_fd} <= set(others)
        with pytest.raises(BadHandle, match="shares nothing now"):
            import_weights(weights, timeout_s=2)
        assert not caplog.records, "a message with released memory was attempted"


# --- a reader


def test_a_reader_that_never_releases_sees_the_memory_of_the_new_publication(trainer: TrainerRank) -> None:
    imported = import_weights(trainer.publish(0), timeout_s=2)
    offload_and_load(trainer)
    weights = trainer.publish(1)
    assert imported.is_of(weights)
    imported.renew(weights, timeout_s=2)
    imported.check_version(1)
    for name, tensor in trainer.tensors.items():
        assert torch.equal(imported.gathered(name), tensor.bfloat16()), name
    imported.close()


def refused_weights(trainer: TrainerRank) -> list[tuple[weights_pb2.PublishedWeights, type[TasukiError]]]:
    """Weights with an unpublished version, and with a manifest of another layout; their memory itself is available."""
    weights = trainer.publish(1)
    other_version, other_layout = weights_pb2.PublishedWeights(), weights_pb2.PublishedWeights()
    other_version.CopyFrom(weights)
    other_version.policy_version = 2
    other_layout.CopyFrom(weights)
    other_layout.handles[0].manifest_digest = "0" * 64
    return [(other_version, VersionOrder), (other_layout, BadHandle)]


def test_a_rank_holds_nothing_after_a_sync_or_a_refused_one(trainer: TrainerRank) -> None:
    held = native.totals().imported_bytes
    receiver = WeightReceiver(Engine(torch.bfloat16))
    receiver.receive(trainer.publish(0), import_timeout_s=2)
    assert native.totals().imported_bytes == held
    offload_and_load(trainer)
    for weights, error in refused_weights(trainer):
        with pytest.raises(error):
            receiver.receive(weights, import_timeout_s=2)
        assert native.totals().imported_bytes == held
    receiver.receive(trainer.publish(2), import_timeout_s=2)


# --- the front


async def test_the_front_holds_nothing_after_a_sync_or_a_refused_one(trainer: TrainerRank, tmp_path: Path) -> None:
    held = native.totals().imported_bytes
    with ExitStack() as stack:
        rank = BreakingRank(list(SHAPES.items()), socket_dir=tmp_path)
        stack.callback(rank.close)
        calls = RankCalls(1, socket_dir=tmp_path)
        stack.callback(calls.close)
        sync = WeightSync(calls, socket_dir=tmp_path)
        stack.callback(sync.close)
        for version in (0, 3):
            weights = trainer.publish(version)
            imported = await sync.prepare(weights)
            assert native.totals().imported_bytes > held, "the front compares with what it maps"
            await sync.run(weights, imported, timeout_s=30)
            assert native.totals().imported_bytes == held
            offload_and_load(trainer)
            for refused, error in refused_weights(trainer):
                with pytest.raises(error):
                    await sync.prepare(refused)
                assert native.totals().imported_bytes == held
            offload_and_load(trainer)
